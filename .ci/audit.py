"""Known vulnerabilities of what is installed here, by pip-audit.

pip-audit ends well where its service has never heard of a package, as a mirror of an index has not, and with a
traceback where there is no network. Neither says anything about a package: both are told as NOT CHECKED, loudly, and
fail nothing. A vulnerability fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field

_SERVICES = ("pypi", "osv")
"""Asked in this order, until one knows the packages."""
_LONGEST_S = 60
_OF_PYTHON = frozenset({"pip", "setuptools"})
"""What a new venv brings along: as old as the Python that made it, and nothing that is installed for our users."""


@dataclass
class Audit:
    """`unchecked`: packages of which nothing is known, and why; `aside`: what was found in `_OF_PYTHON`."""

    checked: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.found else 0

    def lines(self) -> list[str]:
        out = [f"audit: VULNERABLE: {each}" for each in self.found]
        out += [f"audit: this venv's own, python -m pip install --upgrade mends it: {each}" for each in self.aside]
        if self.unchecked:
            why = "; ".join(sorted(set(self.unchecked.values()))[:3])
            out.append(f"audit: NOT CHECKED for known vulnerabilities: {len(self.unchecked)} packages ({why})")
        if self.checked:
            out.append(f"audit: {len(self.checked)} packages checked, {len(self.found)} vulnerabilities")
        return out


def read(report: str) -> Audit:
    """pip-audit's JSON. Raises ValueError."""
    audit = Audit()
    for package in json.loads(report)["dependencies"]:
        name = package["name"]
        if "skip_reason" in package:
            reason = package["skip_reason"]
            if "editable" not in reason:  # Ourselves.
                audit.unchecked[name] = "the service does not know them" if "not found" in reason else reason
            continue
        audit.checked.append(name)
        for each in package["vulns"]:
            fixed = ", ".join(each.get("fix_versions", ())) or "no version yet"
            found = audit.aside if name in _OF_PYTHON else audit.found
            found.append(f"{name} {package['version']}: {each['id']}, fixed in {fixed}")
    return audit


def run(service: str) -> Audit:
    """Raises OSError or ValueError where nothing was checked."""
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner=off",
               "--timeout=10", "--format=json", f"--vulnerability-service={service}"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{service}: no answer in {_LONGEST_S} s") from None
    try:
        return read(done.stdout)
    except (ValueError, KeyError, TypeError):
        last = next(reversed([line for line in done.stderr.splitlines() if line.strip()]), "nothing was said")
        raise ValueError(f"{service}: {last.strip()[:200]}") from None


def main() -> int:
    why: list[str] = []
    audit: Audit | None = None
    for service in _SERVICES:
        try:
            audit = run(service)
        except (OSError, ValueError) as exc:
            why.append(str(exc))
            continue
        if audit.checked:
            break
    if audit is None:
        print("audit: NOT CHECKED for known vulnerabilities: no service could be asked (" + " | ".join(why) + ")")
        return 0
    print("\n".join(audit.lines()))
    return audit.exit_code


if __name__ == "__main__":
    sys.exit(main())
