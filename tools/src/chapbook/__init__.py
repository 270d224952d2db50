"""The `chapbook` command: list, try, create, check, benchmark and release the packages of the shelf."""
