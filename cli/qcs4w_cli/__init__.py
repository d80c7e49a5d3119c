"""qcs4w_cli: the commands. Parse, one library call, one report; the only package that prints or exits."""
