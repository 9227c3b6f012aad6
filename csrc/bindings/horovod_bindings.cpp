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

// Python's start: gets the set, the tickets, the operations' signatures, and the rows of each member of the first
// operation, and returns futures.
Order::Start start_of(py::object function) {
  const std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [held](const horovod::Issue& issue) {
    const py::gil_scoped_acquire gil;
    py::list signatures;
    for (const horovod::Response& response : issue.responses) signatures.append(response.operation->signature);
    horovod::Futures futures;
    try {
      for (const py::handle each : (*held)(issue.set, issue.tickets, signatures, issue.responses.front().rows)) {
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

void bind_operation(py::module_& m) {
  py::class_<horovod::Operation, std::shared_ptr<horovod::Operation>>(m, "AgreedOperation")
      .def(py::init([](std::string key, std::string signature, std::string fuses, int64_t nbytes, bool has_number,
                       bool may_lack_joined, bool is_call, bool is_join, bool may_be_small, int op, double prescale,
                       double postscale) {
             const horovod::Reduction reduction = {static_cast<horovod::Op>(op), prescale, postscale};
             return std::make_shared<horovod::Operation>(
                 horovod::Operation{std::move(key), std::move(signature), std::move(fuses), nbytes, has_number,
                                    may_lack_joined, is_call, is_join, may_be_small, reduction});
           }),
           py::kw_only(), py::arg("key"), py::arg("signature"), py::arg("fuses"), py::arg("nbytes"),
           py::arg("has_number"), py::arg("may_lack_joined"), py::arg("is_call"), py::arg("is_join"),
           py::arg("may_be_small"), py::arg("op"), py::arg("prescale"), py::arg("postscale"));
}

}  // namespace

void bind_horovod(pybind11::module_& m) {
  bind_operation(m);
  py::class_<Order, std::shared_ptr<Order>>(m, "Order")
      .def(py::init(&make_order), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("sets"), py::arg("control"),
           py::arg("fusion_nbytes"), py::arg("stall_warning_s"), py::arg("stall_shutdown_s"), py::arg("start"),
           py::arg("mismatch"), py::arg("say"))
      .def(
          "submit",
          [](Order& order, int64_t ticket, int set, std::shared_ptr<horovod::Operation> operation,
             std::vector<int64_t> rows, std::string problem, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, bool at_once) {
            order.submit(ticket, set, {horovod::kNoId, std::move(operation), std::move(rows), std::move(problem)},
                         inputs, std::move(outputs), at_once);
          },
          py::arg("ticket"), py::arg("set_id"), py::arg("operation"), py::arg("rows"), py::arg("problem"),
          py::arg("inputs"), py::arg("outputs"), py::arg("at_once"), NoGil())
      .def("poll", &Order::poll, py::arg("ticket"), NoGil())
      // Returns the error's text, empty if there is none, and of a join the rank that joined last.
      .def(
          "wait",
          [](Order& order, int64_t ticket) {
            const Order::Result result = order.wait(ticket);
            return std::make_pair(result.error, result.number);
          },
          py::arg("ticket"), NoGil())
      .def("fail", &Order::fail, py::arg("why"), NoGil())
      .def("shutdown", &Order::shutdown, NoGil())
      .def_property_readonly("failure", py::cpp_function(&Order::failure, NoGil()));
}

}  // namespace fusedcomm
