"""YAML text -> plain values, with the line of each and the keys given twice (which PyYAML would drop silently)."""

from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Path = tuple[str | int, ...]

_MOST_NODES = 200_000
"""Of a document with its aliases written out, which may be a billion in a kilobyte."""


def load_tree(text: str) -> tuple[Any, dict[Path, int], list[tuple[Path, int]]]:
    """The values, `{path: line}` counted from 1, and `(path, line)` of every repeated key.

    Raises yaml.YAMLError (with `problem` and `problem_mark` where known) for text that is not one YAML document.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (loader.walk(node, ()) if node else None), loader.lines, loader.repeated
    except RecursionError:
        raise yaml.YAMLError("nested too deeply, or within itself") from None
    except OverflowError:  # PyYAML makes a character of any \\U escape.
        raise yaml.YAMLError("an escape that is no character") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[Path, int] = {}
        self.repeated: list[tuple[Path, int]] = []
        self._n_nodes = 0

    def walk(self, node: Node, path: Path) -> Any:
        self._n_nodes += 1
        if self._n_nodes > _MOST_NODES:
            raise ConstructorError(None, None, f"more than {_MOST_NODES} values", node.start_mark)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.walk(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: MappingNode, path: Path) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    self.repeated.append(((*path, key.value), key.start_mark.line + 1))
                seen.add(key.value)
        self.flatten_mapping(node)
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key must be plain text", key.start_mark)
            at = (*path, _text(key.value, key))
            self.lines[at] = key.start_mark.line + 1
            values[key.value] = self.walk(value, at)
        return values

    def _scalar(self, node: Node) -> Any:
        try:
            value = self.construct_object(node)
        except (ValueError, AttributeError) as exc:
            # PyYAML lets a date such as 2020-99-99, and !!timestamp of a word, fail like this.
            raise ConstructorError(None, None, str(exc), node.start_mark) from None
        return _text(value, node) if isinstance(value, str) else value


def _text(text: str, node: Node) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, by an escape.
        raise ConstructorError(None, None, "text that is no Unicode", node.start_mark) from None
    return text
