"""qcs4w_cli: the commands. They parse, call the library and report; the only package that prints or exits."""
