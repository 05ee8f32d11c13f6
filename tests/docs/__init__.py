"""Every command in the README and the docs: run, or checked by its own parser with a reason why it is not run.

collect.py   finds them, in blocks and in the text
checks.py    what is done with each, by its program; an unknown program is an error, so that no new command escapes
"""
