#include "c10d_transport.h"

#include <ATen/ATen.h>

#include <utility>

namespace fusedcomm {
namespace {

// A view of wire bytes that keeps them alive for as long as the backend holds it.
at::Tensor as_tensor(const WireSpan& span, at::ScalarType dtype) {
  const int64_t numel = span.nbytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(span.data, {numel}, [owner = span.owner](void*) {}, at::TensorOptions().dtype(dtype));
}

at::ScalarType scalar_type(Wire wire) {
  switch (wire) {
    case Wire::kFp32:
      return at::kFloat;
    case Wire::kBf16:
      return at::kBFloat16;
    case Wire::kFp16:
      return at::kHalf;
    default:
      TORCH_CHECK(false, "fusedcomm: an int8 wire cannot be all-reduced");
  }
}

void on_end(const c10::intrusive_ptr<c10d::Work>& work, Lane::Completion done) {
  work->getFuture()->addCallback([done = std::move(done)](c10::ivalue::Future& future) {
    done(future.hasError() ? future.exception_ptr() : nullptr);
  });
}

}  // namespace

C10dTransport::C10dTransport(BackendPtr scatter, BackendPtr gather)
    : scatter_(std::move(scatter)), gather_(std::move(gather)) {
  TORCH_CHECK(scatter_ && gather_, "fusedcomm: a transport needs two backends");
  TORCH_CHECK(scatter_->getRank() == gather_->getRank() && scatter_->getSize() == gather_->getSize(),
              "fusedcomm: the two backends disagree about rank or world size");
}

void C10dTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  at::Tensor input = as_tensor(send, at::kByte);
  at::Tensor output = as_tensor(receive, at::kByte);
  std::vector<int64_t> equal_splits;
  on_end(backend(channel).alltoall_base(output, input, equal_splits, equal_splits), std::move(done));
}

void C10dTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {as_tensor(data, scalar_type(dtype))};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

void C10dTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

void C10dTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                      Lane::Completion done) {
  at::Tensor to = output, from = input;
  on_end(backend(channel)._allgather_base(to, from), std::move(done));
}

}  // namespace fusedcomm
