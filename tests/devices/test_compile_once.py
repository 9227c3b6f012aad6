"""Each kernel is compiled by one rank of a host. The tests' ranks are processes that attach at the same time, with a
compiler that records its calls."""

import multiprocessing as mp
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedcomm.devices import compile_once

KERNELS = [f"kernel {index}" for index in range(6)]


def compiler(folder):
    """A compiler that works as Triton's: it returns what was compiled before, or compiles it, which takes a while."""

    def compile(kernel):
        done = Path(folder) / str(kernel)
        if not done.exists():
            with open(Path(folder) / "compiled", "a") as log:
                log.write(f"{kernel}\n")
            time.sleep(0.05)
            made = Path(folder) / f"made by {os.getpid()}"
            made.write_text(str(kernel))
            made.rename(done)
        return done.read_text()

    return compile


def number_of_compilations(folder):
    return Counter((Path(folder) / "compiled").read_text().splitlines())


def load_kernels(rank, world_size, folder, library):
    """Loads kernels as attach does on cuda, except that Triton compiles nothing. Returns the symbols, sorted."""
    import fake_cuda

    from fusedcomm.config import Config
    from fusedcomm.devices import cuda
    from fusedcomm.kernels import compile, variants
    from fusedcomm.native import _C

    note = compiler(folder)
    loaded = []

    def compiled(variant, capability):
        symbol = note(str(variant).replace("/", " "))
        loaded.append(symbol)
        return variants.Compiled(variant, symbol, b"", "", 16, 0, tuple(_C.kernel_params(variant.kernel)), 0)

    own = compile.check_triton, compile.compile
    compile.check_triton, compile.compile = lambda: "3.7", compiled
    os.environ["TRITON_CACHE_DIR"] = folder
    try:
        dist.barrier()
        cuda.load_kernels(fake_cuda.gpu(library).driver, Config(), world_size, [torch.float32], 90, announce=False)
    finally:
        compile.check_triton, compile.compile = own
        del os.environ["TRITON_CACHE_DIR"]
    return sorted(loaded)


def test_ranks_that_attach_at_once_compile_each_kernel_once(ranks, library, tmp_path):
    pytest.importorskip("triton", reason="the CUDA path's kernels are Triton's")
    (tmp_path / "cache").mkdir()
    first, *others = ranks.run(load_kernels, str(tmp_path / "cache"), library, world_size=4)
    assert len(first) > 3 and all(other == first for other in others)
    assert number_of_compilations(tmp_path / "cache") == dict.fromkeys(first, 1)


def hold_all(folder, pipe):
    """Compiles the first kernel for longer than any test waits."""

    def compile(kernel):
        pipe.send(kernel)
        time.sleep(600)

    list(compile_once.compiled(KERNELS, compile, folder))


@pytest.fixture
def holder(tmp_path):
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=hold_all, args=(str(tmp_path), theirs), daemon=True)
    process.start()
    assert ours.recv() == KERNELS[0]
    yield process
    process.kill()
    process.join()


def test_a_rank_that_dies_while_it_compiles_leaves_no_lock(tmp_path, holder):
    compiled = compile_once.compiled(KERNELS, compiler(tmp_path), str(tmp_path))
    assert [next(compiled) for _ in KERNELS[1:]] == KERNELS[1:]  # the holder still compiles the first
    os.kill(holder.pid, signal.SIGKILL)
    assert list(compiled) == KERNELS[:1]
    assert number_of_compilations(tmp_path) == dict.fromkeys(KERNELS, 1)


def test_a_rank_that_is_stopped_is_not_waited_for_long(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(compile_once, "TIMEOUT_S", 0.3)
    compiled = list(compile_once.compiled(KERNELS, compiler(tmp_path), str(tmp_path)))
    assert compiled == [*KERNELS[1:], KERNELS[0]]


def no_locks(*_):
    raise OSError(37, "No locks available")


def test_without_locks_everything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    compiled = compile_once.compiled(KERNELS, compiler(tmp_path), str(tmp_path / "a file" / "cache"))
    assert list(compiled) == KERNELS
    monkeypatch.setattr(compile_once.fcntl, "lockf", no_locks)
    assert list(compile_once.compiled(KERNELS, compiler(tmp_path), str(tmp_path))) == KERNELS


def test_what_the_compiler_raises_is_raised_and_holds_no_lock(tmp_path):
    def fail(kernel):
        raise RuntimeError(f"cannot compile {kernel}")

    with pytest.raises(RuntimeError, match="cannot compile kernel 0"):
        list(compile_once.compiled(KERNELS, fail, str(tmp_path)))
    assert list(compile_once.compiled(KERNELS, compiler(tmp_path), str(tmp_path))) == KERNELS
