"""Check whether an HTTP request is allowed: by the keys of Triton's restricted APIs, by its bearer token, and by the
web page that sends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge_server.config import HttpConfig, RestrictedGroup
from edge_server.errors import EdgeServerError, Forbidden, Unauthenticated
from edge_server.frontends.access_control import is_shared_key, is_this_machine
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.cross_site_check import CrossSiteCheck
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.request_head import Headers, RequestHead

_NO_CHANGE = (
    "rollback, unpin and changes of engine builds are allowed from this machine only; to allow them from other "
    "machines, require a key: --http-restricted-api=model-repository:<key>=<value>"
)

_NO_PICTURES = (
    "camera pictures are shown to this machine only; to show them to other machines, require a key by "
    "--http-restricted-api=view:<key>=<value> or a token for 'view', or open them to everyone by --view-open"
)


class AccessCheck:
    """Checks requests by their category, one of `config.CATEGORIES`, and by the site of the page that sends them."""

    def __init__(self, config: HttpConfig | None = None, tokens: Tokens | None = None) -> None:
        config = config or HttpConfig()
        self.tokens = tokens or Tokens()
        self._restricted: Mapping[str, RestrictedGroup] = {
            category: group for group in config.restricted for category in group.categories
        }
        self._is_view_open = config.is_view_open
        self.cross_site_check = CrossSiteCheck(
            "https" if config.tls_cert else "http", HostNames(config.allowed_hosts), CorsPolicy(config.allowed_origins)
        )

    @property
    def key_headers(self) -> list[str]:
        """The names of the headers with shared keys."""
        return sorted({group.key for group in self._restricted.values()})

    def is_guarded(self, category: str) -> bool:
        """Return whether requests of a category need a key or a token."""
        return category in self._restricted or self.tokens.requires_token(category)

    def admit(self, headers: Headers, category: str) -> str:
        """Return the name of the request's token, "" if it needs none or has a shared key, and count the request.

        Raises Unauthenticated, Forbidden.
        """
        return self._admit(headers, category, self.tokens.admit)

    def admit_uncounted(self, headers: Headers, category: str) -> str:
        """Return and raise the same as `admit`, but count only a refused request."""
        return self._admit(headers, category, self._name_of)

    def check_change(self, peer: str | None) -> None:
        """Raise Forbidden unless the client at an address may change what serves in every model control mode.

        Where model-repository needs neither a key nor a token, only this machine may. Unlike load and unload, these
        changes cannot be forbidden by the mode.
        """
        if not self.is_guarded("model-repository") and not is_this_machine(peer):
            raise Forbidden(_NO_CHANGE)

    def check_pictures(self, head: RequestHead, peer: str | None) -> None:
        """Raise Forbidden if a caller that the keys and tokens admit may not see camera pictures."""
        if self.is_guarded("view"):
            return
        if not self._is_view_open and not is_this_machine(peer):
            raise Forbidden(_NO_PICTURES)
        # Without a key, also where --http-allowed-origin lets other sites read everything else.
        self.cross_site_check.check_reader(head)

    def may_change_models(self, head: RequestHead) -> bool:
        """Return whether a request may load and unload models: neither a page of another site nor a key forbids it."""
        try:
            self.cross_site_check.check(head, "model-repository", changes_server=True)
        except Forbidden:
            return False
        return self.may_use(head.headers, "model-repository")

    def may_use(self, headers: Headers, category: str) -> bool:
        """Return whether a request may use a category."""
        try:
            self._admit(headers, category, self.tokens.name_of)
        except Unauthenticated:
            if "Authorization" in headers:
                self.tokens.count_refused(category)  # this may be an attempt to guess a token
            return False
        except Forbidden:
            return False
        return True

    def _name_of(self, authorization: Sequence[str], category: str) -> str:
        try:
            return self.tokens.name_of(authorization, category)
        except EdgeServerError:
            self.tokens.count_refused(category)
            raise

    def _admit(self, headers: Headers, category: str, token_name: Callable[[Sequence[str], str], str]) -> str:
        group = self._restricted.get(category)
        if group is not None and is_shared_key(headers.getall(group.key), group.value):
            return ""
        if self.tokens.requires_token(category):
            return token_name(headers.getall("Authorization"), category)
        if group is not None:
            mistake = "; its value is wrong" if len(headers.getall(group.key)) == 1 else ""
            raise Forbidden(f"This API is restricted, expecting header '{group.key}'{mistake}")
        return ""
