"""Models of other libraries in and out: Hugging Face directories, read and written directly.

Nothing that is read is executed or unpickled, and nothing outside the directory is opened.
"""
