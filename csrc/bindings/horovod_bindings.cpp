// Binds the order of Horovod's operations.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "frontends/horovod/order.h"
#include "transport/without_gil.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using horovod::Order;

// The end joins threads, which may be waiting for the GIL. A child of fork() has none of them. Threads that have not
// ended keep the object.
void end_without_gil(Order* order) {
  if (order->is_in_fork()) return;
  const WithoutGil no_gil;
  if (order->shutdown()) delete order;
}

// Python's start: gets the set, the requests, the operations' signatures, and the rows of each member of the first
// operation, and returns futures.
Order::Start start_of(py::object function) {
  const std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [held](const Order::Issue& issue) {
    const py::gil_scoped_acquire gil;
    py::list signatures;
    for (const horovod::Response& response : issue.responses) signatures.append(response.operation->signature);
    horovod::Futures futures;
    try {
      for (const py::handle each : (*held)(issue.set, issue.requests, signatures, issue.responses.front().rows)) {
        futures.push_back(each.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut);
      }
      return futures;
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
  };
}

std::shared_ptr<Order> make_order(int rank, int size, std::vector<std::vector<int>> sets,
                                  std::optional<horovod::BackendPtr> control, int64_t fusion_nbytes,
                                  double stall_warning_s, double stall_shutdown_s, py::object start,
                                  horovod::Negotiator::Mismatch mismatch, horovod::Negotiator::Say say) {
  Order::Options options;
  options.rank = rank;
  options.size = size;
  options.sets = std::move(sets);
  options.negotiator = {fusion_nbytes, stall_warning_s, stall_shutdown_s};
  return {new Order(options, control.value_or(horovod::BackendPtr()), start_of(std::move(start)), std::move(mismatch),
                    std::move(say)),
          end_without_gil};
}

}  // namespace

void bind_horovod(pybind11::module_& m) {
  using horovod::Operation;
  py::class_<Operation, std::shared_ptr<Operation>>(m, "AgreedOperation")
      .def(
          py::init([](std::string key, std::string signature, std::string fuses, int64_t nbytes, bool may_lack_joined,
                      bool is_join, int op) {
            return std::make_shared<Operation>(Operation{std::move(key), std::move(signature), std::move(fuses), nbytes,
                                                         may_lack_joined, is_join, static_cast<horovod::Op>(op)});
          }),
          py::kw_only(), py::arg("key"), py::arg("signature"), py::arg("fuses"), py::arg("nbytes"),
          py::arg("may_lack_joined"), py::arg("is_join"), py::arg("op"));
  // part: contiguous, on the CPU; gets the sum if every member sends one.
  py::class_<Order::Request, Order::RequestPtr>(m, "OrderedRequest")
      .def(py::init([](int set, std::shared_ptr<Operation> operation, std::vector<int64_t> rows, std::string problem,
                       std::optional<at::Tensor> part) {
             const auto request = std::make_shared<Order::Request>();
             request->set = set;
             request->entry = {std::move(operation), std::move(rows), std::move(problem), part.value_or(at::Tensor())};
             return request;
           }),
           py::arg("set_id"), py::arg("operation"), py::arg("rows"), py::arg("problem"), py::arg("part"))
      .def_readonly("number", &Order::Request::number);
  py::class_<Order, std::shared_ptr<Order>>(m, "Order")
      .def(py::init(&make_order), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("sets"), py::arg("control"),
           py::arg("fusion_nbytes"), py::arg("stall_warning_s"), py::arg("stall_shutdown_s"), py::arg("start"),
           py::arg("mismatch"), py::arg("say"))
      .def("submit", &Order::submit, py::arg("request"), py::arg("at_once"), NoGil())
      .def("poll", &Order::poll, py::arg("request"), NoGil())
      // Returns the error's text, empty if there is none.
      .def("wait", &Order::wait, py::arg("request"), NoGil())
      .def("give_up", &Order::give_up, py::arg("why"), NoGil())
      .def("shutdown", &Order::shutdown, NoGil())
      .def_property_readonly("failure", py::cpp_function(&Order::failure, NoGil()));
}

}  // namespace fusedcomm
