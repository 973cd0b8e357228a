"""TLS for the ports that a broker listens on, and for its connections to other brokers."""

from __future__ import annotations

import ssl

from braid.broker.config import BrokerTlsConfig, TlsConfig
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


def trusts_less(now: ssl.SSLContext, before: ssl.SSLContext) -> bool:
    """Tell whether clients that `before` has let in may not be let in any more."""
    if now.verify_mode is not before.verify_mode:
        return now.verify_mode is ssl.CERT_REQUIRED
    return not set(before.get_ca_certs(binary_form=True)) <= set(now.get_ca_certs(binary_form=True))


def peer_tls(config: BrokerTlsConfig) -> ssl.SSLContext:
    """Return the context for connections to the other brokers of the cluster, which listen with TLS as this one does.
    Their certificates must name the addresses that they are registered with. A broker that asks for a certificate is
    shown this broker's own."""
    try:
        context = ssl.create_default_context(cafile=config.peer_ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(config.certificate, config.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(
            f"TLS to other brokers cannot be set up from certificate {config.certificate!r} and authority "
            f"{config.peer_ca or 'of the system'!r}: {error}"
        ) from error
    return context
