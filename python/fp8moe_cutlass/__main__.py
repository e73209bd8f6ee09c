"""python -m fp8moe_cutlass: --cmake-dir and --include-dir, or the command line."""

import sys

import fp8moe_cutlass

_PATHS = {"--cmake-dir": fp8moe_cutlass.cmake_dir, "--include-dir": fp8moe_cutlass.include_dir}

if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in _PATHS:
        print(_PATHS[sys.argv[1]]())
    else:
        from fp8moe_cutlass.tools.cli import main

        main()
