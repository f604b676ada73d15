"""`dflash report`: one HTML page, and the same charts as PNG files, about runs and stores.

read.py    what a run folder and a store hold, as arrays and plain values
charts.py  the charts, drawn with matplotlib
figure.py  a drawing as SVG for the page (its colours follow the reader's theme) and as PNG
page.py    the page: charts and tables, every text escaped, no script and nothing from the network
build.py   the command
"""
