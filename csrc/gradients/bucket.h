// A bucket of gradients, whichever front end brings it: whose gradients, and where each of them lies in memory.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fusedcomm {

// The memory of a bucket's gradients: one run that holds them all, or a tensor for each. Jobs keep it until they end.
class Gradients {
 public:
  // flat: [sum of numels], or a sparse tensor of one parameter. numels: of each gradient, in the order of the run.
  Gradients(at::Tensor flat, const std::vector<int64_t>& numels);
  // Each where it lies, dense, in any order of dimensions; all of one dtype, on one device. Complex ones count as twice
  // as many real ones. Throws ValueError naming the gradient that is not so.
  explicit Gradients(std::vector<at::Tensor> apart);

  bool in_one_run() const { return in_one_run_; }
  bool is_sparse() const { return tensors_.front().is_sparse(); }
  at::ScalarType dtype() const { return tensors_.front().scalar_type(); }
  c10::Device device() const { return tensors_.front().device(); }
  size_t size() const { return numels_.size(); }
  int64_t numel() const { return numel_; }  // of all
  int64_t nbytes() const { return numel_ * static_cast<int64_t>(tensors_.front().element_size()); }

  // Where offsets count from: a multiple of 16 bytes. Null if sparse.
  std::byte* origin() const { return origin_; }
  // Elements from the origin to each gradient, and elements of each.
  const std::vector<int64_t>& offsets() const { return offsets_; }
  const std::vector<int64_t>& numels() const { return numels_; }

  // Everything that owns memory: the run (of a sparse one its indices and values), or each gradient.
  std::vector<at::Tensor> storages() const;
  // The run. Of gradients that lie apart the first, which stands for all where one tensor is asked for.
  const at::Tensor& front() const { return tensors_.front(); }
  // [numel of the gradient], a view.
  at::Tensor view(size_t index) const;
  // [numel()]: the run itself, or a copy of the gradients one after another.
  at::Tensor flattened() const;
  // Writes `flat` [numel()] back to where the gradients lie.
  void assign(const at::Tensor& flat) const;

 private:
  std::vector<at::Tensor> tensors_;
  const bool in_one_run_;
  std::byte* origin_ = nullptr;
  std::vector<int64_t> offsets_, numels_;
  int64_t numel_ = 0;
};

using GradientsPtr = std::shared_ptr<const Gradients>;

// The gradient of one parameter.
struct Piece {
  at::Tensor parameter;
  std::byte* address = nullptr;  // null if sparse
  int64_t numel = 0;             // a complex parameter counts twice
};

struct Bucket {
  // gradients: of `parameters`, in their order.
  Bucket(size_t index_in_pass, bool is_last_of_pass, std::vector<at::Tensor> parameters, GradientsPtr where);

  size_t index;  // in the backward pass, the same on every rank
  bool is_last;  // of the backward pass
  std::vector<Piece> pieces;
  GradientsPtr gradients;
  // Called when the bucket is met for the first time, or anew with other parameters: throws if the front end sees that
  // these are not the gradients of its parameters. May be empty.
  std::function<void()> check;
};

}  // namespace fusedcomm
