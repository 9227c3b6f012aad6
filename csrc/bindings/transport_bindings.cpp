// Binds channels between hosts, the sentinels that find lost peers, and the requests to a store that a watch makes.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/bindings.h"
#include "transport/c10d_transport.h"
#include "transport/error_text.h"
#include "transport/peer_sentinels.h"
#include "transport/store_client.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

// The end of a backend joins its threads, which may be waiting for the GIL.
struct DeleteWithoutGil {
  void operator()(PeerSentinels* sentinels) const {
    const py::gil_scoped_release no_gil;
    delete sentinels;
  }
};

// Returns the answer to `request`. Throws Python's TimeoutError if there is none.
template <typename Request>
auto answer_of(StoreClient& client, const Request& request) {
  const auto answer = std::make_shared<std::invoke_result_t<Request, c10d::Store&>>();
  const auto ask = [&] {
    const py::gil_scoped_release no_gil;
    return client.ask([answer, request](c10d::Store& store) { *answer = request(store); });
  };
  if (ask()) return *answer;
  PyErr_SetNone(PyExc_TimeoutError);
  throw py::error_already_set();
}

void bind_store_client(py::module_& m) {
  using Text = std::string;
  using Keys = std::vector<Text>;
  py::class_<StoreClient>(m, "StoreClient")
      .def(py::init([](const StorePtr& store, double timeout_s) {
             return StoreClient(store, std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout_s)));
           }),
           py::kw_only(), py::arg("store"), py::arg("timeout_s"))
      .def("check",
           [](StoreClient& of, const Keys& keys) {
             return answer_of(of, [keys](c10d::Store& store) { return store.check(keys); });
           })
      .def("set",
           [](StoreClient& of, const Text& key, const Text& value) {
             answer_of(of, [key, value](c10d::Store& store) { return store.set(key, value), true; });
           })
      .def("get",
           [](StoreClient& of, const Text& key) {
             return py::bytes(answer_of(of, [key](c10d::Store& store) { return store.get_to_str(key); }));
           })
      .def("multi_get",
           [](StoreClient& of, const Keys& keys) {
             std::vector<py::bytes> values;
             for (const auto& value : answer_of(of, [keys](c10d::Store& store) { return store.multiGet(keys); })) {
               values.emplace_back(reinterpret_cast<const char*>(value.data()), value.size());
             }
             return values;
           })
      .def("compare_set",
           [](StoreClient& of, const Text& key, const Text& expected, const Text& desired) {
             return py::bytes(answer_of(of, [key, expected, desired](c10d::Store& store) {
               return store.compareSet(key, expected, desired);
             }));
           })
      .def_property_readonly("problem", &StoreClient::problem);
}

}  // namespace

void bind_transport(pybind11::module_& m) {
  bind_store_client(m);
  m.def(
      "with_hosts",
      [](const C10dTransport& transport, int64_t local_rank, int64_t ranks_per_host, int64_t host, int64_t num_hosts,
         const BackendPtr& local_scatter, const BackendPtr& local_gather, const BackendPtr& cross_scatter,
         const BackendPtr& cross_gather) {
        return transport.with_hosts({local_rank, ranks_per_host, host, num_hosts},
                                    {local_scatter, local_gather, cross_scatter, cross_gather});
      },
      py::arg("transport"), py::kw_only(), py::arg("local_rank"), py::arg("ranks_per_host"), py::arg("host"),
      py::arg("num_hosts"), py::arg("local_scatter"), py::arg("local_gather"), py::arg("cross_scatter"),
      py::arg("cross_gather"));

  py::class_<PeerSentinels, std::unique_ptr<PeerSentinels, DeleteWithoutGil>>(m, "PeerSentinels")
      .def(py::init<BackendPtr, int>(), py::kw_only(), py::arg("backend"), py::arg("tag"), NoGil())
      .def(
          "look",
          [](PeerSentinels& sentinels) {
            std::map<int, std::string> lost;
            for (const auto& [peer, error] : sentinels.look()) lost[peer] = error_text(error);
            return lost;
          },
          NoGil());
}

}  // namespace fusedcomm
