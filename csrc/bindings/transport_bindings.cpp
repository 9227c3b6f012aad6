// Binds channels between hosts, and the sentinels that find lost peers.
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <map>
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "transport/c10d_transport.h"
#include "transport/error_text.h"
#include "transport/peer_sentinels.h"

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

}  // namespace

void bind_transport(pybind11::module_& m) {
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
