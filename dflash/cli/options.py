"""A click command made from config dataclasses: flags from their settings, TOML below the flags, errors in one line.

`ConfigCommand` calls its function with the finished configs, in the order of the classes, and prints the dict that
comes back. Whatever is wrong before the function runs (a flag, the TOML file) is a usage error, exit code 2; what the
function raises as `DflashError` is one sentence on stderr and the error's own exit code; anything else keeps its
traceback.
"""

import contextlib
import errno
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from dflash.config import REQUIRED, Setting, convert, read_toml, settings, toml_section
from dflash.errors import DflashError, DiskFullError

Result = dict[str, Any]
ADVICE = {  # for what a file system refuses
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
        "name another place or move it away",
    ),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "look at the disk (dmesg) and start the same command again"),
}
METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON"}


class Failure(click.ClickException):
    """A known error: its sentence on stderr, its exit code, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.code = exit_code

    @property
    def exit_code(self) -> int:  # type: ignore[override]  # click reads it from the instance
        return self.code


class SettingOption(click.Option):
    """One setting as a flag. Its default stays None, so that "not given" and "given as the default" differ."""

    def __init__(self, one: Setting) -> None:
        self.setting = one
        declarations = [one.name, one.flag]
        if one.kind is bool:
            declarations[1] = f"{one.flag}/--no-{one.flag.removeprefix('--')}"
            super().__init__(declarations, default=None, help=_help(one))
            return
        metavar = one.metavar or ("|".join(one.choices) if one.choices else METAVARS[one.kind])
        if one.many and not one.metavar:
            metavar += " ..." if one.kind is str else f",{metavar},..."
        super().__init__(
            declarations,
            default=None,
            help=_help(one),
            metavar=metavar,
            multiple=one.many,
            shell_complete=completion(one),
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Only the form that changes the default: `--no-…` exists for what a TOML file switched on."""
        on, off = self.opts, self.secondary_opts
        try:
            if off:
                self.opts, self.secondary_opts = (off, []) if self.setting.default is True else (on, [])
            return super().get_help_record(ctx)
        finally:
            self.opts, self.secondary_opts = on, off


def completion(one: Setting) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """What a shell offers for a value: its choices; for other texts, most of which are paths, the files there."""

    def offered(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if one.choices:
            return [CompletionItem(choice) for choice in map(str, one.choices) if choice.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")] if one.kind is str else []

    return offered


def _help(one: Setting) -> str:
    if one.required:
        return f"{one.help}  [required]"
    if one.default is None or one.default is False or one.default in ((), {}, ""):
        return one.help
    if one.many:
        shown = ",".join(map(str, one.default))
    elif one.kind is float:
        shown = f"{one.default:.4g}"
    else:
        shown = "on" if one.default is True else str(one.default)
    return f"{one.help}  [default: {shown}]"


class ConfigCommand(click.Command):
    """A command whose callback takes one config of each class and returns the result."""

    def __init__(
        self,
        name: str,
        *,
        configs: tuple[type, ...],
        present: Callable[..., str],
        example: str,
        **kwargs: Any,
    ) -> None:
        self.section = name
        self.configs = configs
        self.present = present
        self.settings = settings(*configs)
        kwargs["params"] = [*(kwargs.get("params") or ()), *self._parameters()]
        kwargs["epilog"] = f"\b\nExample:\n  {example}"
        kwargs["context_settings"] = {"help_option_names": ["-h", "--help"]}
        super().__init__(name, **kwargs)

    def _parameters(self) -> list[click.Parameter]:
        parameters: list[click.Parameter] = []
        for one in self.settings.values():
            if one.positional:
                metavar, count = one.metavar or one.name.upper(), -1 if one.many else 1
                parameters.append(
                    click.Argument(
                        [one.name], required=False, metavar=metavar, nargs=count, shell_complete=completion(one)
                    )
                )
            else:
                parameters.append(SettingOption(one))
        parameters.append(
            click.Option(
                ["--config", "config_file"],
                metavar="F.toml",
                shell_complete=lambda ctx, parameter, incomplete: [CompletionItem(incomplete, type="file")],
                help=f"Read settings from the section [{self.section}] of a TOML file; flags win over it.",
            )
        )
        parameters.append(click.Option(["--print-config"], is_flag=True, help="Print all settings as TOML and stop."))
        parameters.append(
            click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON, one object.")
        )
        return parameters

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--data a b c` is `--data a --data b --data c`, as users of globs expect."""
        if not any(one.positional for one in self.settings.values()):
            args = spread(args, {one.flag for one in self.settings.values() if one.many})
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        parameters = dict(ctx.params)
        as_json, print_config = parameters.pop("as_json"), parameters.pop("print_config")
        try:
            values = self._values(parameters, parameters.pop("config_file"))
            if print_config:
                click.echo(toml_section(self.section, self.settings, values), nl=False)
                return
            configs = [self._build(cls, values) for cls in self.configs]
        except DflashError as error:
            raise click.UsageError(str(error), ctx) from error
        with known_errors(), stdout_to_stderr():
            result = self.callback(*configs) if self.callback else {}
        if os.environ.get("RANK", "0") == "0":  # under torchrun one process speaks for all
            click.echo(to_json(result) if as_json else self.present(result, *configs))
        if result.get("ok") is False:
            ctx.exit(1)

    def _values(self, parameters: dict[str, Any], config_file: str | None) -> dict[str, Any]:
        """What the TOML file and, above it, the flags give."""
        values = read_toml(config_file, self.section, self.settings) if config_file else {}
        flags = {name: given for name, given in parameters.items() if given is not None and given != ()}
        for name in flags:
            values.pop(self.settings[name].instead_of or "", None)
        for name, given in flags.items():
            one = self.settings[name]
            if one.many and one.kind is not str:
                given = ",".join(given)
            values[name] = convert(one, given, one.metavar or name.upper() if one.positional else one.flag)
        return values

    def _build(self, cls: type, values: dict[str, Any]) -> Any:
        own = settings(cls)
        missing = [one for one in own.values() if one.required and values.get(one.name, REQUIRED) is REQUIRED]
        if missing:
            one = missing[0]
            what = f"argument `{one.metavar or one.name.upper()}`" if one.positional else f"option {one.flag}"
            raise DflashError(f"Missing {what}; give it: {one.help}")
        return cls(**{name: value for name, value in values.items() if name in own})


def spread(args: list[str], flags: set[str]) -> list[str]:
    """Repeat a flag that takes several values before each of the values that follow it."""
    out: list[str] = []
    current: str | None = None
    for position, arg in enumerate(args):
        if arg == "--":
            return out + args[position:]
        if _is_flag(arg):
            name = arg.split("=", 1)[0]
            current = name if name in flags else None
            if current and "=" not in arg:
                if position + 1 == len(args) or _is_flag(args[position + 1]):
                    out.append(arg)  # nothing follows: click says so
                continue
            out.append(arg)
        elif current:
            out += [current, arg]
        else:
            out.append(arg)
    return out


def _is_flag(arg: str) -> bool:
    return arg.startswith("-") and arg != "-"


@contextlib.contextmanager
def known_errors() -> Iterator[None]:
    """What a user, a file or the machine caused becomes one line and an exit code."""
    try:
        yield
    except DflashError as error:
        raise Failure(str(error), error.exit_code) from error
    except KeyboardInterrupt as error:
        raise Failure(
            "Stopped by SIGINT; run `dflash` with the same words again to go on.", 128 + signal.SIGINT
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" at {error.filename}" if error.filename else ""
            raise Failure(
                f"No space left on the disk{where}: free some and start the same command again.",
                DiskFullError.exit_code,
            ) from error
        if error.filename and (advice := ADVICE.get(error.errno or 0)):
            raise Failure(f"{error.filename} cannot be used: {error.strerror}; {advice}.", 1) from error
        raise


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Whatever a library prints while a command runs, NCCL's banner from C included, goes to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def to_json(result: Any) -> str:
    """One line of strict JSON: NaN and infinity, which JSON lacks, become null; numpy's scalars become numbers."""
    return json.dumps(_plain(result), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item") and not isinstance(value, float):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
