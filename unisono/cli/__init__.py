"""The command `unisono`; each subcommand is a module, loaded when it is called."""
