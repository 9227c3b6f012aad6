// Decorator of a job: sums a bucket exactly that the codec cannot carry.
#include <algorithm>
#include <utility>
#include <vector>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

// The weight of a bucket, and the sum of heads that it receives; null and undefined tensors without weights.
struct Head {
  PassWeightPtr weight;
  PassWeights* weights;
  at::Tensor own, sum;

  Head(const PassWeightPtr& of_pass, PassWeights* of_all) : weight(of_pass), weights(of_all) {
    if (!weight) return;
    own = weight->head;
    sum = at::empty_like(own);
  }
  double pack_factor() const { return weight ? weight->pack : 1; }
  int64_t numel() const { return weight ? own.numel() : 0; }
  // Multiplies what has been summed. Call it when `sum` is there.
  void apply(const at::Tensor& values) const {
    if (!weight) return;
    values.mul_(weight->factor_of(sum));
    if (!sum.is_cpu()) weights->received(weight.get(), sum);
  }
  // The error of the bucket.
  std::exception_ptr error_of(std::exception_ptr error) const {
    return error || !weight || !sum.is_cpu() ? error : weights->received(weight.get(), sum);
  }
};

PassthroughStages dense_stages(std::shared_ptr<TensorTransport> transport, GradientsPtr gradients, double factor,
                               const Head& head) {
  PassthroughStages stages;
  auto flat = std::make_shared<at::Tensor>();
  stages.pack = [gradients, flat, head, mean = head.pack_factor() * factor / transport->world_size()] {
    at::NoGradGuard no_grad;
    *flat = gradients->flattened().mul_(mean);
    if (head.weight) *flat = at::cat({*flat, head.own.to(flat->scalar_type())});
  };
  stages.scatter = [transport, flat](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, *flat, std::move(done));
  };
  if (!gradients->in_one_run() || head.weight) {
    stages.unpack = [gradients, flat, head] {
      at::NoGradGuard no_grad;
      const at::Tensor values = flat->narrow(0, 0, flat->numel() - head.numel());
      if (head.weight) head.sum.copy_(flat->narrow(0, values.numel(), head.numel()));
      head.apply(values);
      gradients->assign(values);
    };
  }
  return stages;
}

// The tensors of one sparse bucket under way.
struct SparseExchange {
  at::Tensor local;         // coalesced and scaled; indices (sparse_dim, nnz) int64, values (nnz, …)
  at::Tensor nnz, all_nnz;  // (1 + head,), and all ranks' one after another, float64: the entries, and the rank's head
  at::Tensor payload, all_payload;  // bytes of the indices, then of the values, each padded to the longest rank's nnz
  int64_t longest = 0;              // nnz of the longest rank, at least 1
};

// The bytes of `tensor`, padded with zeros to `length` in dimension `dim`.
at::Tensor padded_bytes(const at::Tensor& tensor, int64_t dim, int64_t length) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length;
  at::Tensor out = at::zeros(sizes, tensor.options());
  out.narrow(dim, 0, tensor.size(dim)).copy_(tensor);
  return out.flatten().view(at::kByte);
}

// The tensor whose bytes start at `offset` of `row`, shaped like `like` except for its `length` in dimension `dim`.
at::Tensor from_bytes(const at::Tensor& row, int64_t offset, const at::Tensor& like, int64_t dim, int64_t length) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length;
  const int64_t nbytes = c10::multiply_integers(sizes) * static_cast<int64_t>(like.element_size());
  return row.narrow(0, offset, nbytes).clone().view(like.scalar_type()).view(sizes);
}

// The mean of sparse COO tensors. Ranks exchange how many entries each has. Then they exchange the entries, padded to
// the longest rank's, and add them in rank order. `result` receives the mean, coalesced. gloo's own sparse all-reduce
// is not used, because it was seen to corrupt the heap now and then (torch 2.11 and 2.13, two ranks, a few in 10⁴
// calls, also under DDP's default hook).
PassthroughStages sparse_stages(std::shared_ptr<TensorTransport> transport, at::Tensor buffer,
                                std::shared_ptr<at::Tensor> result, double factor, const Head& head) {
  auto exchange = std::make_shared<SparseExchange>();
  const int64_t world_size = transport->world_size();
  PassthroughStages stages;
  stages.pack = [exchange, buffer, world_size, factor, head] {
    at::NoGradGuard no_grad;
    exchange->local = buffer.coalesce().mul(head.pack_factor() * factor / static_cast<double>(world_size));
    const auto options = at::TensorOptions().dtype(at::kDouble).device(buffer.device());
    exchange->nnz = at::full({1}, static_cast<double>(exchange->local._nnz()), options);
    if (head.weight) exchange->nnz = at::cat({exchange->nnz, head.own.to(at::kDouble)});
    exchange->all_nnz = at::empty({world_size * exchange->nnz.numel()}, options);
  };
  stages.scatter = [exchange, transport](Lane::Completion done) {
    transport->all_gather_tensor(Channel::kScatter, exchange->all_nnz, exchange->nnz, std::move(done));
  };
  stages.reduce = [exchange, world_size, head] {
    at::NoGradGuard no_grad;
    const at::Tensor by_rank = exchange->all_nnz.view({world_size, -1});
    if (head.weight) head.sum.copy_(by_rank.narrow(1, 1, head.numel()).sum(0));
    exchange->all_nnz = by_rank.select(1, 0).to(at::kLong);
    // Not every backend can send an empty message, so at least one entry is sent, if only padding.
    exchange->longest = std::max<int64_t>(exchange->all_nnz.max().item<int64_t>(), 1);
    exchange->payload = at::cat({padded_bytes(exchange->local._indices(), 1, exchange->longest),
                                 padded_bytes(exchange->local._values(), 0, exchange->longest)});
    exchange->all_payload = at::empty({world_size * exchange->payload.numel()}, exchange->payload.options());
  };
  stages.gather = [exchange, transport](Lane::Completion done) {
    transport->all_gather_tensor(Channel::kGather, exchange->all_payload, exchange->payload, std::move(done));
  };
  stages.unpack = [exchange, buffer, result, world_size, head] {
    at::NoGradGuard no_grad;
    const at::Tensor local_indices = exchange->local._indices(), local_values = exchange->local._values();
    const int64_t indices_nbytes = local_indices.size(0) * exchange->longest * 8;
    at::Tensor sum;
    for (int64_t rank = 0; rank < world_size; ++rank) {
      const int64_t nnz = exchange->all_nnz[rank].item<int64_t>();
      const at::Tensor row = exchange->all_payload.view({world_size, -1})[rank];
      const at::Tensor indices = from_bytes(row, 0, local_indices, 1, exchange->longest).narrow(1, 0, nnz);
      const at::Tensor values = from_bytes(row, indices_nbytes, local_values, 0, exchange->longest).narrow(0, 0, nnz);
      const at::Tensor part = at::sparse_coo_tensor(indices, values, buffer.sizes());
      sum = rank == 0 ? part : sum.add(part);
    }
    *result = sum.coalesce();
    head.apply(result->_values());
  };
  return stages;
}

// Merges the stages into one transfer, for lanes whose tasks run at once (streams).
PassthroughStages on_wire_lane(PassthroughStages stages) {
  PassthroughStages merged;
  merged.scatter = [stages = std::move(stages)](Lane::Completion done) {
    const auto ended = [](std::exception_ptr error) {
      if (error) std::rethrow_exception(error);
    };
    if (stages.pack) stages.pack();
    stages.scatter(ended);
    if (stages.reduce) stages.reduce();
    if (stages.gather) stages.gather(ended);
    if (stages.unpack) stages.unpack();
    done(nullptr);
  };
  return merged;
}

}  // namespace

void submit_passthrough(std::shared_ptr<BucketJob> job, const Bucket& bucket, const PassWeightPtr& weight,
                        PassWeights* weights, const FuturePtr& future, Engine* engine,
                        const std::shared_ptr<TensorTransport>& transport) {
  const GradientsPtr& gradients = bucket.gradients;
  const double factor = bucket.factor().value_or(1);
  const Head head(weight, weights);
  // Read when the job is done: a sparse bucket then has another tensor.
  auto result = std::make_shared<at::Tensor>(gradients->front());
  job->owner = std::make_shared<std::pair<GradientsPtr, std::shared_ptr<at::Tensor>>>(gradients, result);
  job->on_done = [future, result, head](std::exception_ptr error) {
    complete(*future, *result, head.error_of(std::move(error)));
  };
  if (gradients->is_sparse()) {
    for (const at::Tensor& part : {result->_indices(), result->_values()}) engine->device().will_use(part);
    TORCH_WARN_ONCE("fusedcomm: ", job->label->text, " is sparse and is summed exactly, uncompressed");
  } else if (!bucket.is_kept()) {
    for (const at::Tensor& tensor : gradients->tensors()) engine->device().will_use(tensor);
  }
  PassthroughStages stages = gradients->is_sparse() ? sparse_stages(transport, *result, result, factor, head)
                                                    : dense_stages(transport, gradients, factor, head);
  // On streams, an intermediate tensor's memory goes back to the stream that made it. One stream must therefore make
  // and use all of them.
  if (!gradients->device().is_cpu()) stages = on_wire_lane(std::move(stages));
  engine->submit_passthrough(std::move(job), std::move(stages));
}

}  // namespace fusedcomm
