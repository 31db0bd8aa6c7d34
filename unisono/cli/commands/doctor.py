"""``unisono doctor``: checks what works on this machine, and shows the settings and the peers that a job trusts."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono import __version__
from unisono.cli.machine.checks import CheckResult, look_for, run_checks, third_party
from unisono.cli.machine.gpu_checks import gpu_findings
from unisono.cli.machine.means import LAUNCHERS, NCCL, STORES, TRANSPORTS, judged
from unisono.collectives.bootstrap.environment import MPI_WORLD, detect, launchers
from unisono.collectives.bootstrap.trust import trust_of
from unisono.errors import UsageError
from unisono.options import FIELDS, Options, unknown_variables, variable
from unisono.transports.host.host_discovery import Surroundings
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.machine.gpu_inventory import Gpu, islands
from unisono.tuning.machine.inventory import machine
from unisono.tuning.machine.levels import ranges
from unisono.tuning.measure import calibration_files


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: the field of `Options`, its environment variable, its value, and the origin of the value."""

    name: str
    variable: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All results of the doctor; the fields are those of the JSON form."""

    machine: dict[str, str]
    checks: list[CheckResult]
    packages: list[CheckResult]
    gpus: list[CheckResult]
    transports: list[CheckResult]
    launchers: list[CheckResult]
    stores: list[CheckResult]
    settings: list[Setting]
    launcher: str
    trust: str

    @property
    def healthy(self) -> bool:
        """Whether Unisono can be used here."""
        return all(finding.usable for finding in self.checks if finding.required)


@click.command(short_help="Check what works on this machine, and say why the rest does not.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, as_json: bool) -> int:
    """Check which features work on this machine, and say why the others do not.

    The exit code is 1 if Unisono itself cannot be used.
    """
    report = examine(os.environ)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _show(report, Console(highlight=False))
    return 0 if report.healthy else 1


def examine(environ: Mapping[str, str]) -> Diagnosis:
    """Run all checks, and return the report."""
    settings, bad_settings = _settings(environ)
    checks, packages, gpu = run_checks(), look_for(), gpu_findings()
    findings = {finding.subject: finding for finding in (*checks, *packages, *gpu)}
    return Diagnosis(
        _machine(),
        [*checks, *bad_settings],
        packages,
        gpu,
        [*judged(TRANSPORTS, findings), NCCL, *third_party()],
        judged(LAUNCHERS, findings),
        judged(STORES, findings),
        settings,
        launcher(environ),
        trust(environ),
    )


def _machine() -> dict[str, str]:
    allowed = sorted(os.sched_getaffinity(0))
    here = Surroundings.here()
    return {
        "unisono": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host": f"ranks of user {here.user} in network namespace {here.network or 'unknown'} of boot "
        f"{here.machine or 'unknown'} share memory",
        "cores": f"{os.cpu_count()}, of which this process may use {len(allowed)} ({ranges(allowed)})",
        **_parts(),
        "tuning": _calibration(),
    }


def _calibration() -> str:
    """Return which links of this machine are calibrated."""
    machine = fingerprint()
    try:
        calibration = calibration_files.read(machine)
    except (OSError, ValueError) as error:
        return f"the calibration in {calibration_files.path_of(machine)} is not used: {error}"
    if calibration is None:
        return f"no calibration of this machine ({machine}): `unisono calibrate` measures one"
    links = [name for name, link in calibration.parameters.links.items() if link.step.nbytes]
    return f"{', '.join(links)} calibrated, in {calibration.path} (`unisono calibrate show`)"


def _parts() -> dict[str, str]:
    """Return GPUs, network interfaces and, if they are known, the levels of processors."""
    here = machine()
    described = here.describe()
    parts = {"gpus": _gpus(here.gpus), "network": described["network"]}
    return {"shared": described["processors"], **parts} if here.processors.levels else parts


def _gpus(devices: tuple[Gpu, ...]) -> str:
    if not devices:
        return "none that NVML reports"
    joined = "".join(f", NVLink joins {ranges(sorted(island))}" for island in islands(devices))
    names = Counter(each.name for each in devices)
    return ", ".join(f"{number} × {name}" for name, number in names.items()) + joined


def _settings(environ: Mapping[str, str]) -> tuple[list[Setting], list[CheckResult]]:
    findings: list[CheckResult] = []
    try:
        options = Options.from_environment(environ)
    except UsageError as error:
        options = Options()
        findings.append(CheckResult("settings", False, error.message, required=True))
    try:
        detect(environ)
    except UsageError as error:
        findings.append(CheckResult("launcher", False, error.message, required=True))
    findings += [CheckResult("variables", False, sentence) for sentence in unknown_variables(environ)]
    settings = [
        Setting(
            name,
            variable(name),
            str(getattr(options, name)),
            variable(name) if variable(name) in environ else "default",
        )
        for name in FIELDS
    ]
    return settings, findings


def launcher(environ: Mapping[str, str]) -> str:
    """Return the launcher and rank of this process, and the other launchers whose variables are set."""
    try:
        launch = detect(environ)
    except UsageError as error:
        return f"unknown: {error.message}"
    if launch.launcher == "none":
        return "none found: init() makes a job of one rank"
    where = "" if launch.store is None else f", to meet by {'MPI' if launch.store == MPI_WORLD else launch.store}"
    others = launchers(environ)[1:]
    ignored = f" (ignored: {', '.join(others)})" if others else ""
    return f"{launch.launcher}, as rank {launch.rank} of {launch.size}{where}{ignored}"


def trust(environ: Mapping[str, str]) -> str:
    """Return how the job that `environ` describes keeps out other processes."""
    try:
        return trust_of(detect(environ))
    except UsageError:
        return "unknown, as the launcher is"


def _show(report: Diagnosis, console: Console) -> None:
    for name, value in report.machine.items():
        console.print(f"{name:8} {value}", markup=False)
    console.print(_table("Needed", report.checks))
    console.print(_table("Optional packages", report.packages))
    console.print(_table("GPUs", report.gpus))
    console.print(_table("Transports", report.transports))
    console.print(_table("Launchers", report.launchers))
    console.print(_table("Stores, where ranks meet", report.stores))
    title = "Settings (fields of un.Options have these names in lower case, without UNISONO_)"
    table = Table("variable", "value", "from", title=title, title_justify="left")
    for setting in report.settings:
        origin = "environment" if setting.origin == setting.variable else setting.origin
        table.add_row(setting.variable, escape(setting.value), origin)
    console.print(table)
    console.print(f"Launcher: {report.launcher}", markup=False)
    console.print(f"Trust: {report.trust}", markup=False)


def _table(title: str, findings: Sequence[CheckResult]) -> Table:
    has_remedies = any(finding.remedy for finding in findings)
    headings = ["", "usable", "found", *(["remedy"] if has_remedies else [])]
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")  # so that a long command can be copied
    for finding in findings:
        usable = "[green]yes[/]" if finding.usable else "[red]no[/]" if finding.required else "[yellow]no[/]"
        remedy = [escape(finding.remedy)] if has_remedies else []
        table.add_row(finding.subject, usable, escape(finding.detail), *remedy)
    return table
