// A Python module of what only tests use of the product: exchanges of messages. See tests/helpers/native_bindings.py.
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <future>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "transport/exchange.h"
#include "transport/without_gil.h"

namespace py = pybind11;
using namespace fusedcomm;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Ended = std::shared_future<void>;

// The exchange ends without the GIL, because its threads may need it to release a tensor that has a Python object.
std::shared_ptr<Exchange> make_exchange(BackendPtr backend, int max_sending) {
  return {new Exchange(std::move(backend), max_sending), [](Exchange* exchange) {
            const WithoutGil no_gil;
            delete exchange;
          }};
}

WireSpan span_of(const at::Tensor& bytes) {
  return {static_cast<std::byte*>(bytes.data_ptr()), bytes.numel(), std::make_shared<at::Tensor>(bytes)};
}

// Both are contiguous uint8 on cpu.
Ended start(Exchange& exchange, const at::Tensor& send, const at::Tensor& receive) {
  auto ended = std::make_shared<std::promise<void>>();
  exchange.start(span_of(send), span_of(receive),
                 [ended](std::exception_ptr error) { error ? ended->set_exception(error) : ended->set_value(); });
  return ended->get_future().share();
}

}  // namespace

PYBIND11_MODULE(test_bindings, m) {
  py::class_<Ended>(m, "Ended").def("wait", [](const Ended& ended) { ended.get(); }, NoGil());
  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange")
      .def(py::init(&make_exchange), py::arg("backend"), py::kw_only(), py::arg("max_sending"))
      .def("start", &start, py::kw_only(), py::arg("send"), py::arg("receive"), NoGil());
}
