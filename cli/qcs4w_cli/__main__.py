"""python -m qcs4w_cli."""

from .main import main

main()
