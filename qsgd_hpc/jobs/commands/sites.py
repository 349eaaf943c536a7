"""The command sites: list, show, check and write site profiles."""

from __future__ import annotations

import json
import sys

import click

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites as profiles
from qsgd_hpc.jobs.commands import sites_view
from qsgd_hpc.jobs.commands.columns import screen
from qsgd_hpc.jobs.sites import live
from qsgd_hpc.jobs.sites.check import examine
from qsgd_hpc.jobs.sites.draft import new_profile
from qsgd_hpc.jobs.sites.merge import merged, unconfirmed
from qsgd_hpc.jobs.sites.sources import package_faults, sources
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["sites"]

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group("sites")
def sites() -> None:
    """List, show, check or write site profiles.

    Your own profiles are the files $QSGD_HOME/sites/NAME.yaml. Those of a project are
    .qsgd-hpc/sites/NAME.yaml in its folder. Both override the included profile of that name key by
    key.
    """


@sites.command("list")
@_AS_JSON
def list_sites(as_json: bool) -> None:
    """List all profiles and mark the one in use here."""
    here = _here()
    rows = [sites_view.row(name, here) for name in profiles.names()]
    if as_json:
        click.echo(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        console = screen()
        console.print(sites_view.table(rows, console.width))
    for fault in package_faults():
        click.echo(f"qsgd-hpc: {fault}", err=True)


@sites.command("show")
@_AS_JSON
@click.argument("name", required=False)
def show_site(name: str | None, as_json: bool) -> None:
    """Show the queues, the notes and the YAML files of profile NAME.

    Default: the profile in use here.
    """
    name = name or profiles.choose(None).name
    if as_json:
        click.echo(json.dumps(sites_view.profile_json(merged(name)), indent=2))
        return
    click.echo("\n".join(sites_view.site_lines(profiles.load(name))))
    for source in sources(name):
        click.echo(f"\n# --- {source.where}\n{source.text}", nl=False)


@sites.command("check")
@click.option("--no-machine", is_flag=True, help="Check the files only; query no scheduler.")
@_AS_JSON
@click.argument("name", required=False)
def check_site(name: str | None, no_machine: bool, as_json: bool) -> None:
    """Check profile NAME. Default: the one in use here, or all if there is no scheduler.

    Checks its files and lists unconfirmed facts. On the machine itself, compares queues, limits and
    nodes with the scheduler's answers. Exit code 1: a fault or a difference.
    """
    host = profiles.find_host()
    wanted = [name] if name else [profiles.choose(None, host).name]
    if not name and not host.schedulers:
        wanted = profiles.names()
    reports = [examine(each, host, ask_machine=not no_machine) for each in wanted]
    if as_json:
        click.echo(json.dumps([report.as_json() for report in reports], indent=2))
    else:
        for report in reports:
            click.echo("\n".join(sites_view.report_lines(report)))
            if report.differs:
                screen().print(sites_view.differences_table(report))
                own = env.home() / "sites" / f"{report.name}.yaml"
                click.echo(f"  To override a profile that you cannot edit, key by key: {own}")
    for fault in package_faults():
        click.echo(f"qsgd-hpc: {fault}", err=True)
    sys.exit(0 if all(report.is_sound for report in reports) else 1)


@sites.command("new")
@click.option(
    "--scheduler",
    type=click.Choice([*live.ASKED, *(s for s in SCHEDULERS if s not in (*live.ASKED, "local"))]),
    metavar=f"[{'|'.join(live.ASKED)}]",  # the others are answered with what to do
    help="Default: the scheduler of this machine.",
)
@click.option(
    "--stdout", "to_stdout", is_flag=True, help="Print the profile instead of writing a file."
)
@click.option("--force", is_flag=True, help="Replace an existing profile.")
@click.argument("name")
def new_site(name: str, scheduler: str | None, to_stdout: bool, force: bool) -> None:
    """Write a draft of profile NAME for this machine.

    The draft is made from the answers of its scheduler.
    """
    host = profiles.find_host()
    found = sorted(host.schedulers, key=lambda each: each not in live.ASKED)
    scheduler = scheduler or next(iter(found), None)
    text = new_profile(name, scheduler, host, force=force or to_stdout)
    if to_stdout:
        click.echo(text, nl=False)
        return
    target = env.home() / "sites" / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    click.echo(f"{target} written")
    click.echo(f"  fill in  {len(unconfirmed(merged(name)))} facts to verify, and the comments")
    click.echo(f"  check    qsgd-hpc sites check {name}")
    click.echo(f"  try      qsgd-hpc submit --site {name} --dry-run train.py")


def _here() -> str | None:
    try:
        return profiles.choose(None).name
    except UsageError:
        return None


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
