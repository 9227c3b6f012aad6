"""A hook in C++ that does nothing: the base of hooks' times on the host."""

from types import ModuleType

from torch.utils import cpp_extension

from lib.common import REPOSITORY

SOURCE = """
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/csrc/utils/pybind.h>
struct Noop final : c10d::CommHookInterface {
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBuffer();
    std::vector<c10::Device> devices;
    if (!buffer.is_cpu()) devices.push_back(buffer.device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
    future->markCompleted(buffer);
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }
};
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_on", [](c10d::Reducer& reducer) { reducer.register_comm_hook(std::make_unique<Noop>()); });
}
"""


def module() -> ModuleType | None:
    """Has register_on(ddp.reducer). Compiles it, in half a minute, unless a process has before. None, and the reason on
    stdout, where that is not possible."""
    folder = REPOSITORY / "build/noop_hook"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return cpp_extension.load_inline("noop_hook", SOURCE, build_directory=str(folder), no_implicit_headers=True)
    except Exception as error:
        print(f"no no-op hook in C++: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None
