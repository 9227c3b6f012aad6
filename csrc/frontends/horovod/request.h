// A request that a rank has submitted, and what became of it.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "frontends/horovod/messages.h"
#include "frontends/horovod/stream_order.h"

namespace fusedcomm::horovod {

using Clock = std::chrono::steady_clock;

struct Result {
  std::string error;  // empty: good
  std::vector<at::Tensor> outputs;
  std::vector<std::vector<int64_t>> received_splits;  // alltoall: rows from each member
  int number = 0;                                     // join: the rank that joined last
};

struct Request {
  Signature signature;
  std::string key;
  std::vector<at::Tensor> inputs, outputs;
  std::shared_ptr<c10::Event> enqueued;  // what the caller had enqueued for the inputs; null on the CPU
  int set = 0;
  int handle = -1;  // -1: of a rank that takes part without a request of its own
  bool is_issued = false, is_done = false;
  Clock::time_point submitted, issued;
  Result result;
};

// Notes the tensors' dtypes, shapes and device in a signature.
inline void describe(const std::vector<at::Tensor>& tensors, Signature* as) {
  for (const at::Tensor& tensor : tensors) {
    as->tensors.push_back({static_cast<int8_t>(tensor.scalar_type()), tensor.sizes().vec()});
    as->dtype_names.emplace_back(c10::toString(tensor.scalar_type()));
  }
  if (!tensors.empty()) as->device = c10::DeviceTypeName(tensors.front().device().type(), true);
}

using RequestPtr = std::shared_ptr<Request>;

// Collectives that are issued together.
struct IssuedBucket {
  int set = 0;
  std::vector<RequestPtr> requests;
  std::vector<Response::Entry> entries;  // of the requests, in their order
};

}  // namespace fusedcomm::horovod
