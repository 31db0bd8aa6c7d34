"""The command `unisono`. Each subcommand is a module that is imported only when it is called.

- `entry.py`: the function that the command calls first.
- `main.py`: the table of subcommands, and how errors are shown.
- `groups.py`: groups of subcommands that suggest a name.
- `messages.py`: lines on standard error.
- `commands/`: the subcommands.
- `options/`: options that several subcommands share.
- `machine/`: the checks of `unisono doctor`, and the load of the machine.
- `output/`: the terminal, tables, pictures and pages that subcommands show or write.
"""
