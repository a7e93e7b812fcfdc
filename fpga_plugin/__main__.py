"""`python -m fpga_plugin`: the same as the `fpga-plugin` command."""

import sys

from fpga_plugin.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
