"""OpenAPI 3.0 and 3.1 files as tools: one tool an operation, called over HTTP, and the same file back with better words.

Only `description` of operations and of their parameters change. A JSON file stays byte-identical but for them; so does a YAML
file, unless anchors or merge keys are in the way: then it keeps its comments, order and quotes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from chapbook_shared.validate import import_extra
from draft_docs.sources.base import shown
from draft_docs.sources.openai_tools import Path, read_json, replace_strings
from draft_docs.tools import ErrorKind, Hints, ToolResult, ToolSpec

if TYPE_CHECKING:
    import httpx

_SAFE = ("get", "head", "options")
_METHODS = (*_SAFE, "put", "post", "delete", "patch", "trace")
_IDEMPOTENT = (*_SAFE, "put", "delete", "trace")
_BODY = "body"
_PLAIN_HEADERS = ("accept", "accept-encoding", "accept-language", "content-type", "user-agent")
_MAX_GROWTH = 2000  # parts of one schema
_MAX_READ = 1_000_000  # bytes of a response that are read at all


@dataclass(frozen=True)
class _Argument:
    """Where one argument of a tool goes, and where its words stand in the file (None: behind a shared reference)."""

    location: str
    """path, query, header, cookie, `body` (a member of the JSON body) or `whole` (the body itself)."""
    name: str
    place: Path | None


@dataclass(frozen=True)
class _Operation:
    method: str
    path: str
    place: Path
    arguments: Mapping[str, _Argument]
    media_type: str | None


class OpenApiSource:
    """The operations of an OpenAPI document.

    Args:
        text: the document, JSON or YAML.
        base_url: where to call; the document's first server if it is absolute. Without either, nothing can be called.
        headers: sent with every call (credentials, say); they never reach a model.
        client: an `httpx.AsyncClient` to use instead of one of our own.

    Raises ValueError for Swagger 2.0, for references to other files or addresses, and for what is no OpenAPI document.
    """

    def __init__(
        self,
        text: str,
        *,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        client: httpx.AsyncClient | None = None,
        source: str = "",
    ):
        self.text = text
        self._is_json = text.lstrip().startswith("{")
        self.document: dict[str, Any] = read_json(text) if self._is_json else _plain(_read_yaml(text))
        if "swagger" in self.document:
            raise ValueError(f"the document is Swagger {self.document['swagger']}: convert it to OpenAPI 3 first")
        if not str(self.document.get("openapi", "")).startswith("3."):
            raise ValueError("the document is not OpenAPI 3: it has no 'openapi: 3.x' line")
        for key, kind in (("servers", list), ("paths", dict)):
            if not isinstance(self.document.get(key) or kind(), kind):
                raise ValueError(f"{key} must be {'a list' if kind is list else 'an object'} in an OpenAPI document")
        entries = self.document.get("servers") or []
        servers = [str(server.get("url", "")) for server in entries if isinstance(server, dict)]
        self.base_url = base_url or next((url for url in servers if url.startswith(("http://", "https://"))), None)
        self._headers, self._client = dict(headers or {}), client
        self._owns_client = client is None
        self._operations: dict[str, _Operation] = {}
        self.tools: list[ToolSpec] = []
        for operation, item in self._each_operation():
            try:
                self.tools.append(self._tool(operation, item, source))
            except (
                AttributeError,
                KeyError,
                TypeError,
            ) as error:  # lists for objects, parameters without a name, and the like
                method, path, _ = operation
                raise ValueError(f"{method.upper()} {path} is not as OpenAPI has it: {error!r}") from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if self.refusal(name):
            return ToolResult(f"not executed: {self.refusal(name)}", "not_executed")
        httpx = import_extra("httpx", "draft-docs[openapi]")
        if self._client is None:
            self._client = httpx.AsyncClient(follow_redirects=False, timeout=None)
        try:
            request = self._request(self._operations[name], arguments)
        except ValueError as error:
            return ToolResult(str(error), "invalid_arguments")
        try:
            async with self._client.stream(**request) as response:
                body = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > _MAX_READ:
                        break
                kind = response.headers.get("content-type", "")
                text = _body_text(body[:_MAX_READ], kind, response.encoding)
                error_kind = _error_kind(response.status_code)
        except httpx.TransportError as error:
            return ToolResult(f"{type(error).__name__}: {error}", "transient")
        status = f"{response.status_code} {response.reason_phrase}"
        return ToolResult(f"{status}\n{text}" if text else status, error_kind, truncated=len(body) > _MAX_READ)

    def refusal(self, name: str) -> str:
        """Why the tool cannot be called; empty if it can."""
        return "" if self.base_url is not None else "the document names no server; give base_url"

    @property
    def secrets(self) -> list[str]:
        """What must not be seen if the API sends it back: the values of the headers, and what follows a scheme (`Bearer ...`)."""
        values = [value for name, value in self._headers.items() if name.lower() not in _PLAIN_HEADERS]
        return values + [value.split(None, 1)[1] for value in values if len(value.split(None, 1)) == 2]

    def rewritten(self, refined: Mapping[str, ToolSpec]) -> str:
        """The document with the new descriptions. A parameter that several operations share through a reference keeps its words."""
        texts: dict[Path, str] = {}
        for tool in self.tools:
            new, operation = refined.get(tool.name), self._operations[tool.name]
            if new is None:
                continue
            if new.description != tool.description:
                texts[*operation.place, "description"] = new.description
            for name, words in new.parameter_docs.items():
                place = operation.arguments[name].place
                if place is not None and words != tool.parameter_docs[name]:
                    texts[*place, "description"] = words
        if self._is_json:
            return replace_strings(self.text, texts)
        return _replace_yaml_strings(self.text, texts)

    async def aclose(self) -> None:
        if self._client is not None and self._owns_client:
            await self._client.aclose()
            self._client = None

    def _each_operation(self) -> Iterator[tuple[tuple[str, str, Path], dict[str, Any]]]:
        for path, item in (self.document.get("paths") or {}).items():
            if item is None:
                continue
            item, place = self._follow(item, ("paths", path))
            for method in _METHODS:
                if isinstance(item.get(method), dict):
                    # Behind a reference the place is that of what it points to.
                    yield (method, path, (*place, method)), item

    def _tool(self, operation: tuple[str, str, Path], item: dict[str, Any], source: str) -> ToolSpec:
        method, path, place = operation
        spec = item[method]
        name = spec.get("operationId") or f"{method}_{re.sub(r'[^A-Za-z0-9]+', '_', path).strip('_')}"
        if name in self._operations:
            raise ValueError(f"two operations are called {name!r}: operationId must be unique")
        arguments: dict[str, _Argument] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        # An operation's own parameter replaces that of its path with the same name and place.
        listed: dict[tuple[str, str], tuple[dict[str, Any], Path | None]] = {}
        for owner, at in ((item, place[:-1]), (spec, place)):
            for i, parameter in enumerate(owner.get("parameters") or []):
                is_shared = "$ref" in parameter
                found, _ = self._follow(parameter, at)
                listed[found["in"], found["name"]] = (found, None if is_shared else (*at, "parameters", i))
        for (location, wire_name), (parameter, at_parameter) in listed.items():
            key = wire_name if wire_name not in arguments else f"{location}_{wire_name}"
            schema = self._expand(parameter.get("schema") or _first_schema(parameter) or {})
            schema = {} if schema is True else schema
            if parameter.get("description"):
                schema["description"] = parameter["description"]
            properties[key] = schema
            arguments[key] = _Argument(location, wire_name, at_parameter)
            if parameter.get("required"):
                required.append(key)
        media_type = self._body(spec, place, properties, arguments, required)
        words = spec.get("description") or spec.get("summary") or ""
        hints = Hints(read_only=method in _SAFE, idempotent=method in _IDEMPOTENT, destructive=method == "delete")
        self._operations[name] = _Operation(method, path, place, arguments, media_type)
        schema = {"type": "object", "properties": properties, "required": required}
        return ToolSpec(name, words, schema, hints, source or f"{method.upper()} {path}")

    def _body(
        self,
        spec: dict[str, Any],
        place: Path,
        properties: dict[str, Any],
        arguments: dict[str, _Argument],
        required: list[str],
    ) -> str | None:
        """Add the members of a JSON object body as arguments, any other body as one; returns its media type."""
        if "requestBody" not in spec:
            return None
        body, at = self._follow(spec["requestBody"], (*place, "requestBody"))
        content = body.get("content") or {}
        media_type = next((kind for kind in content if "json" in kind), next(iter(content), None))
        if media_type is None:
            return None
        is_shared = "$ref" in spec["requestBody"] or "$ref" in (content[media_type].get("schema") or {})
        schema = self._expand(content[media_type].get("schema") or {})
        if schema.get("type") == "object" and schema.get("properties") and "json" in media_type:
            for member, inner in schema["properties"].items():
                key = member if member not in arguments else f"{_BODY}_{member}"
                inner_place = (*at, "content", media_type, "schema", "properties", member)
                properties[key] = inner
                is_fixed = is_shared or not isinstance(inner, dict)  # `true` has no room for words
                arguments[key] = _Argument(_BODY, member, None if is_fixed else inner_place)
                if body.get("required", False) and member in schema.get("required", ()):
                    required.append(key)
            return media_type
        key = _BODY if _BODY not in arguments else "request_body"
        properties[key] = {**schema, **({"description": body["description"]} if body.get("description") else {})}
        arguments[key] = _Argument("whole", _BODY, None if "$ref" in spec["requestBody"] else at)
        if body.get("required", False):
            required.append(key)
        return media_type

    def _request(self, operation: _Operation, arguments: Mapping[str, Any]) -> dict[str, Any]:
        path, query, headers = operation.path, [], dict(self._headers)
        given = {name.lower() for name in headers}
        cookies: list[str] = []
        body: dict[str, Any] = {}
        whole: Any = None
        for key, value in arguments.items():
            argument = operation.arguments[key]
            if argument.location == "path":
                text = ",".join(map(_wire, value)) if isinstance(value, list) else _wire(value)
                # An empty segment, or one of dots, would reach another address than the one that is documented.
                if text in ("", ".", ".."):
                    raise ValueError(f"{key} must name something, got {text!r}")
                path = path.replace(f"{{{argument.name}}}", quote(text, safe=","))
            elif argument.location == "query":
                for item in value if isinstance(value, list) else [value]:
                    query.append((argument.name, _wire(item)))
            elif argument.location in ("header", "cookie"):
                text = _wire(value)
                if re.search(r"[\r\n\0]", text) or (argument.location == "cookie" and ";" in text):
                    raise ValueError(f"{key} must be a single header value, got {text!r}")
                if argument.location == "cookie":
                    cookies.append(f"{argument.name}={text}")
                elif argument.name.lower() not in given:  # the owner's headers stand, whatever a model says
                    headers[argument.name] = text
            elif argument.location == "whole":
                whole = value
            else:
                body[argument.name] = value
        left = re.findall(r"\{([^}]+)\}", path)
        if left:
            raise ValueError(f"the path needs {', '.join(left)}")
        if {".", ".."} & set(path.split("/")):  # put together from several arguments
            raise ValueError(f"the path must not hold '.' or '..', got {path!r}")
        if cookies:
            headers["Cookie"] = "; ".join(cookies)
        assert self.base_url is not None
        # Put together as text: `urljoin` would let a path such as /http://other.example lead to another host.
        url = f"{self.base_url.rstrip('/')}/{path.lstrip('/')}"
        request: dict[str, Any] = {"method": operation.method.upper(), "url": url, "params": query}
        if operation.media_type is not None and (body or whole is not None):
            payload = body or whole
            is_json = "json" in operation.media_type
            request["content"] = json.dumps(payload, ensure_ascii=False) if is_json else shown(payload)
            headers["Content-Type"] = operation.media_type
        request["headers"] = {name: value.encode("utf-8") for name, value in headers.items()}
        return request

    def _follow(self, value: Any, place: Path) -> tuple[dict[str, Any], Path]:
        """What a value is after following its reference, and where that stands."""
        seen: set[str] = set()
        while isinstance(value, dict) and "$ref" in value:
            reference = str(value["$ref"])
            if reference in seen:
                raise ValueError(f"the reference {reference} leads back to itself")
            seen.add(reference)
            place = _pointer(reference)
            value = self._at(place, reference)
        if not isinstance(value, dict):
            raise ValueError(f"{'/'.join(map(str, place))} must be an object, got {type(value).__name__}")
        return value, place

    def _at(self, place: Path, reference: str) -> Any:
        value: Any = self.document
        for key in place:
            if isinstance(value, list) and str(key).isdigit() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise ValueError(f"the reference {reference} leads nowhere")
        return value

    def _expand(self, schema: Any) -> Any:
        """A schema with its references put in. One that refers to itself keeps an object with the reference's name, and so do
        those of a schema that grows beyond all bounds."""
        self._grown = 0
        return self._expanded(schema, ())

    def _expanded(self, schema: Any, inside: tuple[str, ...]) -> Any:
        self._grown += 1
        if isinstance(schema, list):
            return [self._expanded(item, inside) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            reference = str(schema["$ref"])
            if reference in inside or self._grown > _MAX_GROWTH:
                return {"description": f"the same as {reference.rpartition('/')[2]} above"}
            target = self._at(_pointer(reference), reference)
            beside = {key: self._expanded(value, inside) for key, value in schema.items() if key != "$ref"}
            return {**self._expanded(target, (*inside, reference)), **beside}
        return {key: self._expanded(value, inside) for key, value in schema.items()}


def _pointer(reference: str) -> Path:
    if not reference.startswith("#/"):
        raise ValueError(f"the reference {reference} leads out of the document: bundle it into one file first")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/"))


def _first_schema(parameter: Mapping[str, Any]) -> Any:
    return next((media.get("schema") for media in (parameter.get("content") or {}).values()), None)


def _wire(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _error_kind(status: int) -> ErrorKind | None:
    if status < 400:
        return None
    if status in (401, 403, 407):
        return "auth"
    if status in (408, 425, 429) or status >= 500:
        return "transient"
    return "tool_error"


def _body_text(body: bytes, kind: str, encoding: str | None) -> str:
    if not body:
        return ""
    if "json" in kind or "text" in kind or "xml" in kind or not kind:
        return body.decode(encoding or "utf-8", "replace")
    return f"[{kind or 'binary'}: {len(body)} bytes]"


def _yaml() -> Any:
    yaml = import_extra("ruamel.yaml", "draft-docs[openapi]").YAML()  # round trip, and safe: no tags become objects
    yaml.preserve_quotes = True
    yaml.width = 10_000
    return yaml


def _read_yaml(text: str) -> Any:
    ruamel = import_extra("ruamel.yaml", "draft-docs[openapi]")
    try:
        document = _yaml().load(text)
    except (ruamel.error.YAMLError, RecursionError) as error:
        raise ValueError(f"the document is no YAML: {' '.join(str(error).split()) or 'nested too deeply'}") from None
    if not isinstance(document, dict):
        raise ValueError("the document is no OpenAPI document: it must be an object")
    return document


def _replace_yaml_strings(text: str, changes: Mapping[Path, str]) -> str:
    """A YAML text with the strings at the given paths replaced, or added as the first or second key where there is none yet.

    Only these bytes change, unless an anchor, a merge key or the like is in the way: then the document is written anew, with its comments,
    order and quotes.
    """
    document = _read_yaml(text)
    for path, words in changes.items():
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = words
    edited = _with_yaml_edits(text, changes)
    with contextlib.suppress(Exception):  # an edit that is no YAML, or another document
        if edited is not None and _plain(_read_yaml(edited)) == _plain(document):
            return edited
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def _with_yaml_edits(text: str, changes: Mapping[Path, str]) -> str | None:
    """The text with the changes put in place; None if a path cannot be followed node by node."""
    root = _yaml().compose(text)
    line_end = "\r\n" if "\r\n" in text else "\n"
    edits: list[tuple[int, int, str]] = []
    for path, words in changes.items():
        value = json.dumps(words, ensure_ascii=False)  # a string in double quotes means the same in YAML
        parent = root
        for key in path[:-1]:
            parent = _child(parent, key)
        if parent is None or parent.id != "mapping":
            return None
        old = _child(parent, path[-1])
        start = parent.start_mark
        if old is not None:
            end = old.end_mark.index
            tail = (
                line_end if text[old.start_mark.index : end].endswith("\n") else ""
            )  # a block of lines ends with its last one
            indent = " " * old.end_mark.column if tail else ""
            edits.append((old.start_mark.index, end, value + tail + indent))
        elif parent.flow_style:
            rest = ", " if parent.value else ""
            edits.append((start.index + 1, start.index + 1, f"{path[-1]}: {value}{rest}"))
        else:
            first = parent.value[0][1]
            if first.id == "scalar" and first.style not in ("|", ">"):
                at = re.compile(r"\r?\n|\Z").search(text, first.end_mark.index)
                assert at is not None  # a text has an end
                edits.append((at.start(), at.start(), f"{line_end}{' ' * start.column}{path[-1]}: {value}"))
            else:
                edits.append((start.index, start.index, f"{path[-1]}: {value}{line_end}{' ' * start.column}"))
    for begin, end, value in sorted(edits, reverse=True):
        text = text[:begin] + value + text[end:]
    return text


def _child(node: Any, key: str | int) -> Any:
    if node is not None and node.id == "mapping":
        return next((value for name, value in node.value if name.value == str(key)), None)
    if node is not None and node.id == "sequence" and isinstance(key, int) and key < len(node.value):
        return node.value[key]
    return None


def _plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Round-trip nodes as plain dicts, lists and scalars; status codes and other keys become strings, as in JSON.

    What an alias repeats is one object, so that neither a cycle nor a tower of aliases takes for ever.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        known[id(value)] = made
        made.update((str(key), _plain(inner, known)) for key, inner in value.items())
        return made
    if isinstance(value, list):
        items: list[Any] = []
        known[id(value)] = items
        items.extend(_plain(item, known) for item in value)
        return items
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)
