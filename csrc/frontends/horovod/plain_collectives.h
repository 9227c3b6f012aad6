// Collectives of a process set on a c10d backend: any dtype and op, without a codec.
//
// An allreduce of several tensors copies them into one buffer for each dtype.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "frontends/horovod/signature.h"

namespace fusedcomm::horovod {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
// Called once, when the results are written, from any thread, perhaps within the call below. made: new tensors, if the
// collective makes some; empty after an error.
using Finish = std::function<void(std::exception_ptr error, std::vector<at::Tensor> made)>;

// Tensors are contiguous. Every member calls the same functions in the same order.
class PlainCollectives {
 public:
  explicit PlainCollectives(BackendPtr backend) : backend_(std::move(backend)) {}

  // outputs[i] has inputs[i]'s shape, and may be the same tensor.
  void allreduce(const Signature& as, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                 Finish finish);
  // rows[member][i]: of that member's inputs[i].
  void allgather(const std::vector<at::Tensor>& inputs, const std::vector<std::vector<int64_t>>& rows, Finish finish);
  void broadcast(int root, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                 Finish finish);
  // rows[member][to]: that member's rows to each other member.
  void alltoall(const at::Tensor& input, const std::vector<std::vector<int64_t>>& rows, Finish finish);
  // The first members get one row more if the rows cannot be divided equally.
  void reducescatter(const Signature& as, const std::vector<at::Tensor>& inputs, Finish finish);

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  // Keeps the backend for the life of the process: its end would wait for a peer that is gone.
  void abandon();

 private:
  class Works;
  void reduce_run(const Signature& as, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                  Works& works);

  const BackendPtr backend_;
};

// Zeros, or what does not change a result of `op`: [numel].
at::Tensor neutral(const TensorMeta& meta, Op op);

}  // namespace fusedcomm::horovod
