"""python -m addnorm"""

from addnorm.cli.main import run

run()
