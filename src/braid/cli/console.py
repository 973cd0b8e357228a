"""`braid console`: the web console, a process of its own that talks to the brokers as any client does."""

from __future__ import annotations

import sys

import click

from braid.cli.extras import require_console
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import json_option, print_json
from braid.model.errors import InvalidArgument
from braid.wire.address import parse_address

DEFAULT_LISTEN = "127.0.0.1:8670"


@click.command()
@click.option(
    "--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="Where browsers connect."
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which browsers may call this console, beside its address; may be repeated.",
)
@click.option("--read-only", is_flag=True, help="Show everything and change nothing.")
@click.option("--secure-cookies", is_flag=True, help="Browsers come by HTTPS, through a proxy: send cookies only so.")
@click.option(
    "--reports",
    default="braid-reports",
    show_default=True,
    metavar="TOPIC",
    help="Where Spark jobs publish their reports (--report-topic).",
)
@json_option
@with_target
def console(
    target: Target,
    listen: str,
    allowed_hosts: tuple[str, ...],
    read_only: bool,
    secure_cookies: bool,
    reports: str,
    as_json: bool,
) -> None:
    """Show a cluster in the browser, until Ctrl-C.

    The console asks the brokers of --admin-url (several by comma) and finds the others. It looks at records by --url,
    or where the brokers say. Where brokers want tokens, each person logs in with a token, and the console can do what
    that token may. It listens on this machine only, unless --listen says otherwise.

    \b
    Examples:
      braid console
      braid console --admin-url http://10.0.0.1:8660,http://10.0.0.2:8660 --read-only
      braid console --listen 0.0.0.0:8670 --allow-host braid.example.com --secure-cookies
    """
    require_console("braid console")
    from braid.cli.target import DEFAULT_URL
    from braid.console.console import ConsoleConfig
    from braid.console.server import run

    address = parse_address(listen, 8670)
    config = ConsoleConfig(
        admin_urls=admin_urls(target.admin_url),
        url="" if target.url == DEFAULT_URL else target.url,
        tls_ca=target.tls_ca,
        host=address.host,
        port=address.port,
        allowed_hosts=allowed_hosts,
        read_only=read_only,
        secure_cookies=secure_cookies,
        reports_topic=reports,
    )

    def ready(url: str) -> None:
        if as_json:
            print_json({"url": url})
        else:
            click.echo(f"The console is at {url}. Ctrl-C stops it.")
        sys.stdout.flush()

    run(config, ready)


def admin_urls(given: str) -> tuple[str, ...]:
    """Return the admin ports that were named, several by comma. Raises `InvalidArgument`."""
    found = tuple(each.strip().rstrip("/") for each in given.split(",") if each.strip())
    wrong = [each for each in found if not each.startswith(("http://", "https://"))]
    if wrong or not found:
        raise InvalidArgument(
            f"{', '.join(wrong) or 'nothing'} is no admin URL: write http://host:port, several by comma"
        )
    return found
