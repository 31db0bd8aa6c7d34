"""Groups of subcommands that suggest a name when a subcommand does not exist."""

from __future__ import annotations

import difflib

import click

# Names that users of other programs try, and the options that do the same.
_HABITS = {"help": "--help", "version": "--version"}


class SuggestingGroup(click.Group):
    """A group that suggests the most similar name for an unknown subcommand, and shows its help without one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, as click does; without any argument, show the help and fail."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that `args` begins with, as click does; fails with a suggestion if there is none."""
        name = args[0]
        if name[:1].isalnum() and self.get_command(ctx, name) is None:
            if name in _HABITS:
                ctx.fail(f"there is no command {name!r}: use {_HABITS[name]}")
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(name, names, n=1)
            there = f"; there {'are' if len(names) > 1 else 'is only'} {', '.join(names)}"
            hint = f"; did you mean {near[0]!r}?" if near else there
            ctx.fail(f"there is no command {name!r}{hint}")
        return super().resolve_command(ctx, args)
