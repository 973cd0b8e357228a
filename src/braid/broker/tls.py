"""TLS for the ports that a broker listens on."""

from __future__ import annotations

import ssl

from braid.broker.config import TlsConfig
from braid.model.errors import InvalidConfig


def server_tls(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.certificate, config.key)
        if config.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(config.client_ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(
            f"TLS cannot be set up from certificate {config.certificate!r} and key {config.key!r}: {error}"
        ) from error
    return context
