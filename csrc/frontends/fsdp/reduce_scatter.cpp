#include "frontends/fsdp/reduce_scatter.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "gradients/bucket_record.h"
#include "gradients/grad_dtype.h"

namespace fusedcomm {
namespace {

// Calls use(index in the row, offset in the row, offset in the stream) for the pieces of one stream of a payload.
template <typename Use>
void for_pieces(const Row& row, const BucketPlan& plan, size_t payload, bool exact, const Use& use) {
  int64_t offset = 0, at = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    // The first layout has the exact stream.
    if (exact ? payload == 0 && row[i].wire == kExactWire : row[i].wire == plan.wires[payload]) {
      use(i, offset, at);
      at += row[i].numel;
    }
    offset += row[i].numel;
  }
}

// Elements of a row that a chunk has in one stream.
int64_t segment_numel(const BucketLayout& layout, bool exact) {
  return exact ? layout.part.exact_numel : layout.part.lossy_numel;
}

// Calls use(index in the row, offset in the row, numel) for what a chunk has of each piece.
template <typename Use>
void for_segment(const Row& row, const BucketPlan& plan, size_t payload, bool exact, int64_t chunk, const Use& use) {
  const int64_t numel = segment_numel(plan.layouts[payload], exact), begin = chunk * numel, end = begin + numel;
  for_pieces(row, plan, payload, exact, [&](size_t i, int64_t offset, int64_t at) {
    const int64_t from = std::max(begin, at), to = std::min(end, at + row[i].numel);
    if (from < to) use(i, offset + from - at, to - from);
  });
}

}  // namespace

ReduceScatter::ReduceScatter(std::shared_ptr<Synchroniser> synchroniser, size_t index, bool is_last, Row row)
    : synchroniser_(std::move(synchroniser)),
      index_(index),
      is_last_(is_last),
      row_(std::make_shared<const Row>(std::move(row))) {
  std::vector<std::string> names;
  for (const RowPiece& piece : *row_) {
    names.push_back(piece.name);
    row_numel_ += piece.numel;
  }
  const auto nbytes = static_cast<double>(row_numel_) * 4 * synchroniser_->engine().world_size();
  label_ = make_label(index_, names, nbytes);
  const std::shared_ptr<const BucketPlan> plan = plan_of(1);
  for (size_t i = 0; i < plan->layouts.size(); ++i) {
    const BucketLayout& layout = plan->layouts[i];
    for (const bool exact : {false, true}) {
      const int64_t segment = segment_numel(layout, exact);
      int64_t missing = segment * layout.num_chunks;
      for_pieces(*row_, *plan, i, exact, [&](size_t piece, int64_t, int64_t) { missing -= (*row_)[piece].numel; });
      padding_numel_ = std::max(padding_numel_, std::min(segment, missing));
    }
  }
  counts_->nonfinite.resize(row_->size());
  residuals_.resize(plan->layouts.size());
  const std::optional<ResidualFormat> feedback = synchroniser_->engine().config().feedback;
  for (size_t i = 0; feedback && i < residuals_.size(); ++i) {
    const BucketLayout& layout = plan->packed_rows[i];
    if (layout.wire == Wire::kFp32 || layout.lossy_numel == 0) continue;
    residuals_[i] = std::make_shared<ResidualBuffer>(layout, *feedback, plan->pack_scale, plan->reduce_scale, Place{},
                                                     at::kCPU, /*of_first_only=*/true);
  }
}

std::shared_ptr<const BucketPlan> ReduceScatter::plan_of(double factor) {
  if (plan_ && factor == factor_) return plan_;
  const WireConfig& config = synchroniser_->engine().config();
  int64_t exact_numel = 0;
  std::vector<int64_t> lossy_numels(config.others.size() + 1);
  for (const RowPiece& piece : *row_) {
    (piece.wire == kExactWire ? exact_numel : lossy_numels.at(static_cast<size_t>(piece.wire))) += piece.numel;
  }
  const int world_size = synchroniser_->engine().world_size();
  factor_ = factor;
  plan_ =
      std::make_shared<const BucketPlan>(plan_reduce_scatter(config, world_size, exact_numel, lossy_numels, factor));
  return plan_;
}

int64_t ReduceScatter::residual_nbytes() const {
  int64_t nbytes = 0;
  for (const auto& residual : residuals_) {
    for (const at::Tensor& storage : residual ? residual->storages() : std::vector<at::Tensor>{}) {
      nbytes += static_cast<int64_t>(storage.nbytes());
    }
  }
  return nbytes;
}

std::map<std::string, at::Tensor> ReduceScatter::residuals() const {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> found;
  for (size_t payload = 0; payload < residuals_.size(); ++payload) {
    if (!residuals_[payload]) continue;
    const BucketLayout& layout = plan_->packed_rows[payload];
    const at::Tensor rows = residuals_[payload]
                                ->values(0, layout.lossy_numel)
                                .view({layout.num_chunks, layout.num_parts, layout.part.lossy_numel})
                                .transpose(0, 1)
                                .reshape({layout.num_parts, -1});
    for_pieces(*row_, *plan_, payload, false, [&](size_t i, int64_t, int64_t at) {
      found[(*row_)[i].name] = rows.narrow(1, at, (*row_)[i].numel).clone();
    });
  }
  return found;
}

void ReduceScatter::restore_residuals(const std::map<std::string, at::Tensor>& residuals) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> streams(residuals_.size());
  for (size_t payload = 0; payload < residuals_.size(); ++payload) {
    if (!residuals_[payload]) continue;
    const BucketLayout& layout = plan_->packed_rows[payload];
    at::Tensor rows = at::zeros({layout.num_parts, layout.num_chunks * layout.part.lossy_numel}, at::kFloat);
    for_pieces(*row_, *plan_, payload, false, [&](size_t i, int64_t, int64_t at) {
      const auto found = residuals.find((*row_)[i].name);
      if (found == residuals.end()) return;
      at::Tensor place = rows.narrow(1, at, (*row_)[i].numel);
      TORCH_CHECK_VALUE(found->second.sizes() == place.sizes(), "fusedcomm: the residual of '", found->first, "' is ",
                        found->second.sizes(), ", and this rank's slices of it are ", place.sizes());
      place.copy_(found->second);
    });
    streams[payload] =
        rows.view({layout.num_parts, layout.num_chunks, layout.part.lossy_numel}).transpose(0, 1).reshape({-1});
  }
  // After every size has been checked.
  for (size_t payload = 0; payload < residuals_.size(); ++payload) {
    if (residuals_[payload]) residuals_[payload]->set_values(streams[payload]);
  }
}

std::map<std::string, int64_t> ReduceScatter::nonfinite() const {
  std::lock_guard<std::mutex> lock(counts_->mutex);
  std::map<std::string, int64_t> found;
  for (size_t i = 0; i < row_->size(); ++i) {
    if (counts_->nonfinite[i] != 0) found[(*row_)[i].name] = counts_->nonfinite[i];
  }
  return found;
}

void ReduceScatter::count_nonfinite(const Row& row, const at::Tensor& input, const BucketPlan& plan, int64_t chunk,
                                    Counts* counts) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = input.view({plan.packed_rows.front().num_parts, -1});
  for (size_t payload = 0; payload < plan.layouts.size(); ++payload) {
    for (const bool exact : {false, true}) {
      for_segment(row, plan, payload, exact, chunk, [&](size_t i, int64_t offset, int64_t numel) {
        const at::Tensor packed = rows.narrow(1, offset, numel).to(at::kFloat) * plan.pack_scale;
        const int64_t count = packed.numel() - packed.isfinite().sum().item<int64_t>();
        std::lock_guard<std::mutex> lock(counts->mutex);
        counts->nonfinite[i] += count;
      });
    }
  }
}

SliceList ReduceScatter::packed(size_t payload, bool exact, const at::Tensor& input, const BucketPlan& plan) const {
  const BucketLayout& own = plan.layouts[payload];
  const int64_t segment = segment_numel(own, exact);
  const GradDtype dtype = grad_dtype_of(input.scalar_type());
  const int64_t element = grad_nbytes(dtype), num_rows = synchroniser_->engine().world_size();
  auto* const data = static_cast<std::byte*>(input.data_ptr());
  std::byte* const zeros = data + num_rows * row_numel_ * element;
  SliceList slices;
  for (int64_t chunk = 0; chunk < own.num_chunks && segment != 0; ++chunk) {
    for (int64_t row = 0; row < num_rows; ++row) {
      int64_t filled = 0;  // elements of the segment
      for_segment(*row_, plan, payload, exact, chunk, [&](size_t, int64_t offset, int64_t numel) {
        slices.append(data + (row * row_numel_ + offset) * element, numel, dtype);
        filled += numel;
      });
      slices.append(zeros, segment - filled, dtype);
    }
  }
  return slices;
}

SliceList ReduceScatter::unpacked(size_t payload, bool exact, const at::Tensor& output, const BucketPlan& plan) const {
  const GradDtype dtype = grad_dtype_of(output.scalar_type());
  auto* const data = static_cast<std::byte*>(output.data_ptr());
  SliceList slices;
  for_pieces(*row_, plan, payload, exact, [&](size_t i, int64_t offset, int64_t) {
    slices.append(data + offset * grad_nbytes(dtype), (*row_)[i].numel, dtype);
  });
  return slices;
}

FuturePtr ReduceScatter::run(const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call) {
  Engine& engine = synchroniser_->engine();
  const int64_t numel = engine.world_size() * row_numel_;
  TORCH_CHECK_VALUE(input.is_cpu() && output.is_cpu(),
                    "fusedcomm: a reduce-scatter of FSDP2 in a wire is for CPU tensors");
  TORCH_CHECK_VALUE(
      input.numel() == numel && output.numel() == row_numel_ && input.is_contiguous() && output.is_contiguous(),
      "fusedcomm: ", label_->text, ": the reduce-scatter has ", input.numel(), " elements for ", output.numel(),
      ", and its parameters have ", numel, " for ", row_numel_);
  const int64_t room = static_cast<int64_t>(input.storage().nbytes() / input.element_size()) - input.storage_offset();
  TORCH_CHECK_VALUE(room >= numel + padding_numel_, "fusedcomm: ", label_->text, ": its input has no room for padding");
  auto future = make_future(output.device());
  const std::shared_ptr<const BucketPlan> plan = plan_of(factor);
  auto job = std::make_shared<BucketJob>();
  job->plan = plan;
  job->label = label_;
  job->is_last = is_last_;
  job->grad_nbytes = static_cast<int64_t>(input.nbytes());
  job->step = call;
  job->owner = std::make_shared<std::tuple<at::Tensor, at::Tensor, decltype(residuals_)>>(output, input, residuals_);
  job->on_nonfinite = [row = row_, input, plan, counts = counts_](const BucketJob&, int64_t chunk) {
    count_nonfinite(*row, input, *plan, chunk, counts.get());
  };
  for (size_t i = 0; i < plan->layouts.size(); ++i) {
    Payload payload;
    payload.streams.origin = input.data_ptr();
    payload.streams.lossy = packed(i, false, input, *plan);
    payload.streams.exact = packed(i, true, input, *plan);
    payload.unpacked.emplace();
    payload.unpacked->origin = output.data_ptr();
    payload.unpacked->lossy = unpacked(i, false, output, *plan);
    payload.unpacked->exact = unpacked(i, true, output, *plan);
    if (residuals_[i]) payload.pack.residual = residuals_[i]->of_first();
    if (engine.config().stochastic) {
      payload.pack.stochastic = true;
      payload.pack.noise = {engine.config().seed, static_cast<uint32_t>(index_), call,
                            static_cast<uint32_t>(engine.rank())};
    }
    job->payloads.push_back(std::move(payload));
  }
  job->on_done = [future, output](std::exception_ptr error) { complete(*future, output, std::move(error)); };
  engine.submit(std::move(job));
  return future;
}

}  // namespace fusedcomm
