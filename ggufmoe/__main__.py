"""``python -m ggufmoe``"""

from .cli import main

main()
