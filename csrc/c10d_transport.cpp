#include "c10d_transport.h"

#include <utility>

namespace fusedcomm {
namespace {

// A view of wire bytes that keeps them alive for as long as the backend holds it.
at::Tensor as_tensor(const WireSpan& span, at::ScalarType dtype, c10::Device device = c10::kCPU) {
  const int64_t numel = span.nbytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::for_blob(span.data, {numel})
      .deleter([owner = span.owner](void*) {})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
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

// NCCL answers a call on the current stream with no Work at all; another backend may give one, which then has to be
// made to wait for on this stream.
void enqueued(const c10::intrusive_ptr<c10d::Work>& work, const Lane::Completion& done) {
  if (work) work->wait();
  done(nullptr);
}

}  // namespace

WorkTransport::WorkTransport(BackendPtr scatter, BackendPtr gather)
    : scatter_(std::move(scatter)), gather_(std::move(gather)) {
  TORCH_CHECK(scatter_ && gather_, "fusedcomm: a transport needs two backends");
  TORCH_CHECK(scatter_->getRank() == gather_->getRank() && scatter_->getSize() == gather_->getSize(),
              "fusedcomm: the two backends disagree about rank or world size");
}

void WorkTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  at::Tensor input = as_tensor(send, at::kByte);
  at::Tensor output = as_tensor(receive, at::kByte);
  std::vector<int64_t> equal_splits;
  on_end(backend(channel).alltoall_base(output, input, equal_splits, equal_splits), std::move(done));
}

void WorkTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype)), std::move(done));
}

void WorkTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

void WorkTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                      Lane::Completion done) {
  at::Tensor to = output, from = input;
  on_end(backend(channel)._allgather_base(to, from), std::move(done));
}

void StreamTransport::all_to_all(Channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  at::Tensor input = as_tensor(send, at::kByte, device_);
  at::Tensor output = as_tensor(receive, at::kByte, device_);
  std::vector<int64_t> equal_splits;
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  enqueued(backend_->alltoall_base(output, input, equal_splits, equal_splits, options), done);
}

void StreamTransport::all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  all_gather_tensor(channel, as_tensor(receive, at::kByte, device_), as_tensor(send, at::kByte, device_),
                    std::move(done));
}

void StreamTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype), device_), std::move(done));
}

void StreamTransport::all_reduce_tensor(Channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  enqueued(backend_->allreduce(tensors, options), done);
}

void StreamTransport::all_gather_tensor(Channel, const at::Tensor& output, const at::Tensor& input,
                                        Lane::Completion done) {
  at::Tensor to = output, from = input;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  enqueued(backend_->_allgather_base(to, from, options), done);
}

}  // namespace fusedcomm
