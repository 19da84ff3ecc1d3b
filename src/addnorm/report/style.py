"""Style sheets of pages and pictures: light, dark, narrow screens, print.

The six series colours are distinguishable with colour-blindness (after Okabe and Ito 2008), and
each has enough contrast with the background to be a text colour.
"""

LIGHT_COLOURS = """
--ground:#fdfdfc;--raised:#f4f4f1;--ink:#1d1f21;--soft:#5d6267;--line:#deded9;--faint:#ebebe6;
--c0:#0067a8;--c1:#c04a12;--c2:#007a5a;--c3:#a3407c;--c4:#7d6200;--c5:#5b6472;
--plus:#004f86;--minus:#b5480f;--over:#ffffff;--good:#007a5a;--warning:#8a5a00;--bad:#b3261e;
"""
DARK_COLOURS = """
--ground:#15171a;--raised:#1f2226;--ink:#e8e9ea;--soft:#a2a8af;--line:#383c42;--faint:#282b30;
--c0:#62b5f2;--c1:#f2935c;--c2:#3cc79c;--c3:#e597c8;--c4:#dfbb4a;--c5:#a9b2bf;
--plus:#7cc4fa;--minus:#f7a06c;--over:#0d1014;--good:#3cc79c;--warning:#e9b44c;--bad:#ff8a80;
"""
PAGE_LAYOUT = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink)}
main{max-width:46rem;margin:0 auto;padding:3.5rem 1.25rem 5rem}
header{margin-bottom:2rem}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.015em;margin:0;text-wrap:balance}
.subtitle{color:var(--soft);font-size:1.1rem;margin:.5rem 0 0;text-wrap:pretty}
h2{font-size:1.25rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:1.25rem;
border-top:1px solid var(--line)}
p{margin:.75rem 0;max-width:40rem;overflow-wrap:anywhere}
a{color:var(--c0);text-underline-offset:.15em}
nav ol{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;margin:0;padding:0;
font-size:.9rem}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;line-height:1.45;margin:1rem 0;
font-variant-numeric:tabular-nums;min-width:50%}
th{font-weight:600;color:var(--soft);border-bottom:1px solid var(--soft)}
th,td{padding:.4rem 1.1rem .4rem 0;text-align:left;vertical-align:baseline}
td{border-bottom:1px solid var(--faint)}
.number{text-align:right}td.number{white-space:nowrap}th{vertical-align:bottom}
th:last-child,td:last-child{padding-right:.25rem}
figure{margin:1.25rem 0 1.75rem}
figcaption{color:var(--soft);font-size:.875rem;line-height:1.5;max-width:40rem;margin-top:.4rem}
figure.table{margin:1rem 0}.table figcaption{font-size:.9rem;margin:0}.table table{margin:.4rem 0}
svg{display:block;max-width:100%;height:auto}
svg svg{display:inline;max-width:none}
.gallery{display:flex;flex-wrap:wrap;gap:0 2.5rem;align-items:flex-start}
.gallery figure{min-width:0;max-width:100%}.gallery figcaption{width:0;min-width:100%}
.facts{display:flex;flex-wrap:wrap;gap:1rem 2.5rem;margin:1.25rem 0 1.5rem}
.facts dt{color:var(--soft);font-size:.85rem}
.facts dd{margin:0;font-size:1.6rem;line-height:1.25;font-weight:600;letter-spacing:-.01em;
font-variant-numeric:tabular-nums}
.remark{background:var(--raised);border-left:3px solid var(--c0);border-radius:0 6px 6px 0;
padding:.7rem 1rem;margin:1rem 0}
.remark p{margin:0}
.remark strong{color:var(--c0);margin-right:.35em}
.remark ul{margin:.4rem 0 0;padding-left:1.1rem;font-size:.9rem;color:var(--soft)}
.good{border-color:var(--good)}.good strong{color:var(--good)}
.warning{border-color:var(--warning)}.warning strong{color:var(--warning)}
.remark.bad{border-color:var(--bad)}.remark.bad strong{color:var(--bad)}
pre{background:var(--raised);border-radius:6px;padding:.8rem 1rem;overflow-x:auto;
font:.85rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
"""
PICTURES = """
svg text{font-family:inherit;fill:var(--ink)}
.tick,text.label{font-size:11px;fill:var(--soft)!important;font-variant-numeric:tabular-nums}
text.label,.name,.mark,.value{font-size:12px}
text.ink{fill:var(--ink)!important}
.name,.mark{font-weight:600}
.value{font-variant-numeric:tabular-nums}
.mark,.name{paint-order:stroke;stroke:var(--ground);stroke-width:3px;stroke-linejoin:round}
.grid{stroke:var(--faint)}.axis{stroke:var(--soft)}
.guide{stroke:var(--soft);stroke-dasharray:4 4}
.guide.bad,.cross.bad{stroke:var(--bad)}
.frame{fill:none;stroke:var(--line)}
.box{fill:var(--raised)}
.curve{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.thin{stroke-width:1;opacity:.6}.dashed{stroke-dasharray:6 4}
.leader{stroke-width:1;opacity:.55;stroke:var(--soft)}
.whisker{stroke-width:1.5;opacity:.75}.thick{stroke-width:5;opacity:.35;stroke-linecap:round}
.cross{fill:none;stroke-width:2.25;stroke-linecap:round}
.cloud{fill:none;stroke-width:4.5;stroke-linecap:round;stroke-opacity:.4}
.ring{fill:none;stroke:var(--ink);stroke-width:2}
.dot{stroke:var(--ground)!important;stroke-width:1}.point{stroke:none!important;fill-opacity:.55}
text.mark.best{fill:var(--ink)}text.mark.bad{fill:var(--bad)}
.bar{fill:var(--c0)}.quiet{fill:var(--c5);fill-opacity:.55}
.plus{fill:var(--plus)}.minus{fill:var(--minus)}.missing{fill:var(--faint)}
.sheet{fill:none}.sheet.plus{stroke:var(--plus)}.sheet.minus{stroke:var(--minus)}
.sheet.missing{stroke:var(--faint)}
.cell{font-size:10px;font-variant-numeric:tabular-nums;pointer-events:none}
svg text.strong{fill:var(--over)}
"""
PHONE = """
main{padding:2rem 1rem 3rem}h1{font-size:1.6rem}h2{margin-top:2.25rem}
.facts dd{font-size:1.35rem}td[dir]:last-child{min-width:9rem}
td.long{min-width:12rem;overflow-wrap:anywhere}
.wide>svg{min-width:0!important}
th,td{padding-right:.6rem}table{font-size:.8rem}
"""
PAPER = """
body{font-size:10.5pt}main{max-width:none;padding:0}
h2{margin-top:1.5rem;break-after:avoid}nav{display:none}
figure,table,.remark,.facts{break-inside:avoid}svg{min-width:0!important}
.wide{overflow:visible}a{color:inherit}
"""
SERIES = "".join(
    f".c{n}{{stroke:var(--c{n})}}text.c{n},.dot.c{n},.point.c{n}{{fill:var(--c{n})}}"
    f"text.c{n}{{stroke:var(--ground)}}"
    for n in range(6)
)
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Helvetica Neue",sans-serif'
THEMES = (
    f":root{{color-scheme:light dark;{LIGHT_COLOURS}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK_COLOURS}}}}}"
)
STYLE = (
    f"{THEMES}body{{font:16px/1.6 {FONT}}}{PAGE_LAYOUT}{PICTURES}{SERIES}"
    f"@media (max-width:34rem){{{PHONE}}}"
    f"@media print{{:root{{color-scheme:light}}{PAPER}}}"
).replace("\n", "")
"""The style sheet of a page."""
PICTURE_STYLE = (
    f"{THEMES}:root{{background:var(--ground);font-family:{FONT}}}{PICTURES}{SERIES}"
).replace("\n", "")
"""The style sheet of a picture in its own file."""
