#include "frontends/fsdp/reduce_scatter.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "gradients/bucket_record.h"
#include "gradients/grad_dtype.h"

namespace fusedcomm {

ReduceScatter::ReduceScatter(std::shared_ptr<Synchroniser> synchroniser, size_t index, bool is_last,
                             std::vector<RowPiece> row)
    : synchroniser_(std::move(synchroniser)), index_(index), is_last_(is_last), row_(std::move(row)) {
  std::vector<std::string> names;
  for (const RowPiece& piece : row_) {
    names.push_back(piece.name);
    row_numel_ += piece.numel;
  }
  const auto nbytes = static_cast<double>(row_numel_) * 4 * synchroniser_->engine().world_size();
  label_ = make_label(index_, names, nbytes);
  const std::shared_ptr<const BucketPlan> plan = plan_of(1);
  for (size_t i = 0; i < plan->layouts.size(); ++i) {
    const BucketLayout& layout = plan->layouts[i];
    for (const bool exact : {false, true}) {
      const int64_t segment = exact ? layout.part.exact_numel : layout.part.lossy_numel;
      int64_t missing = segment * layout.num_chunks;
      for_pieces(i, exact, *plan, [&](int64_t, int64_t numel) { missing -= numel; });
      padding_numel_ = std::max(padding_numel_, std::min(segment, missing));
    }
  }
  counts_->nonfinite.resize(row_.size());
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
  for (const RowPiece& piece : row_) {
    (piece.wire == kExactWire ? exact_numel : lossy_numels.at(static_cast<size_t>(piece.wire))) += piece.numel;
  }
  const int world_size = synchroniser_->engine().world_size();
  factor_ = factor;
  plan_ =
      std::make_shared<const BucketPlan>(plan_reduce_scatter(config, world_size, exact_numel, lossy_numels, factor));
  return plan_;
}

// Calls use(offset in a row, numel) for the pieces of one stream of a row.
template <typename Use>
void ReduceScatter::for_pieces(size_t payload, bool exact, const BucketPlan& plan, const Use& use) const {
  int64_t offset = 0;
  for (const RowPiece& piece : row_) {
    // The first layout has the exact stream.
    const bool is_in = exact ? payload == 0 && piece.wire == kExactWire : piece.wire == plan.wires[payload];
    if (is_in) use(offset, piece.numel);
    offset += piece.numel;
  }
}

template <typename Use>
void ReduceScatter::for_residuals(const Use& use) const {
  for (size_t payload = 0; payload < residuals_.size(); ++payload) {
    if (!residuals_[payload]) continue;
    int64_t at = 0;
    for (const RowPiece& piece : row_) {
      if (piece.wire != plan_->wires[payload]) continue;
      use(piece, payload, at);
      at += piece.numel;
    }
  }
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
  std::vector<at::Tensor> rows(residuals_.size());
  std::map<std::string, at::Tensor> found;
  for_residuals([&](const RowPiece& piece, size_t payload, int64_t at) {
    if (!rows[payload].defined()) {
      const BucketLayout& layout = plan_->packed_rows[payload];
      rows[payload] = residuals_[payload]
                          ->values(0, layout.lossy_numel)
                          .view({layout.num_chunks, layout.num_parts, layout.part.lossy_numel})
                          .transpose(0, 1)
                          .reshape({layout.num_parts, -1});
    }
    found[piece.name] = rows[payload].narrow(1, at, piece.numel).clone();
  });
  return found;
}

void ReduceScatter::restore_residuals(const std::map<std::string, at::Tensor>& residuals) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> rows(residuals_.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!residuals_[i]) continue;
    const BucketLayout& layout = plan_->packed_rows[i];
    rows[i] = at::zeros({layout.num_parts, layout.num_chunks * layout.part.lossy_numel}, at::kFloat);
  }
  for_residuals([&](const RowPiece& piece, size_t payload, int64_t at) {
    const auto found = residuals.find(piece.name);
    if (found == residuals.end()) return;
    at::Tensor place = rows[payload].narrow(1, at, piece.numel);
    TORCH_CHECK_VALUE(found->second.sizes() == place.sizes(), "fusedcomm: the residual of '", piece.name, "' is ",
                      found->second.sizes(), ", and this rank's slices of it are ", place.sizes());
    place.copy_(found->second);
  });
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!residuals_[i]) continue;
    const BucketLayout& layout = plan_->packed_rows[i];
    residuals_[i]->set_values(
        rows[i].view({layout.num_parts, layout.num_chunks, layout.part.lossy_numel}).transpose(0, 1).reshape({-1}));
  }
}

std::map<std::string, int64_t> ReduceScatter::nonfinite() const {
  std::lock_guard<std::mutex> lock(counts_->mutex);
  std::map<std::string, int64_t> found;
  for (size_t i = 0; i < row_.size(); ++i) {
    if (counts_->nonfinite[i] != 0) found[row_[i].name] = counts_->nonfinite[i];
  }
  return found;
}

void ReduceScatter::count_nonfinite(const std::vector<RowPiece>& row, const at::Tensor& input, const BucketPlan& plan,
                                    int64_t chunk, Counts* counts) {
  const at::NoGradGuard no_grad;
  const int64_t num_rows = plan.packed_rows.front().num_parts;
  const at::Tensor rows = input.view({num_rows, -1});
  for (size_t payload = 0; payload < plan.layouts.size(); ++payload) {
    for (const bool exact : {false, true}) {
      const BucketLayout& own = plan.layouts[payload];
      const int64_t segment = exact ? own.part.exact_numel : own.part.lossy_numel;
      const int64_t begin = chunk * segment, end = begin + segment;
      int64_t at = 0, offset = 0;  // elements before the piece, of the stream and of the row
      for (size_t i = 0; i < row.size(); ++i) {
        const bool is_in = exact ? payload == 0 && row[i].wire == kExactWire : row[i].wire == plan.wires[payload];
        if (is_in) {
          const int64_t from = std::max(begin, at), to = std::min(end, at + row[i].numel);
          if (from < to) {
            const at::Tensor packed = rows.narrow(1, offset + from - at, to - from).to(at::kFloat) * plan.pack_scale;
            const int64_t count = packed.numel() - packed.isfinite().sum().item<int64_t>();
            std::lock_guard<std::mutex> lock(counts->mutex);
            counts->nonfinite[i] += count;
          }
          at += row[i].numel;
        }
        offset += row[i].numel;
      }
    }
  }
}

SliceList ReduceScatter::packed(size_t payload, bool exact, const at::Tensor& input, const BucketPlan& plan) const {
  const BucketLayout& own = plan.layouts[payload];
  const int64_t segment = exact ? own.part.exact_numel : own.part.lossy_numel;
  const GradDtype dtype = grad_dtype_of(input.scalar_type());
  const int64_t element = grad_nbytes(dtype), num_rows = synchroniser_->engine().world_size();
  auto* const data = static_cast<std::byte*>(input.data_ptr());
  std::byte* const zeros = data + num_rows * row_numel_ * element;
  SliceList slices;
  for (int64_t chunk = 0; chunk < own.num_chunks && segment != 0; ++chunk) {
    const int64_t begin = chunk * segment, end = begin + segment;
    for (int64_t row = 0; row < num_rows; ++row) {
      int64_t at = 0, filled = 0;  // elements of the stream before the piece; elements of the segment
      for_pieces(payload, exact, plan, [&](int64_t offset, int64_t numel) {
        const int64_t from = std::max(begin, at), to = std::min(end, at + numel);
        if (from < to) {
          slices.append(data + (row * row_numel_ + offset + from - at) * element, to - from, dtype);
          filled += to - from;
        }
        at += numel;
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
  for_pieces(payload, exact, plan,
             [&](int64_t offset, int64_t numel) { slices.append(data + offset * grad_nbytes(dtype), numel, dtype); });
  return slices;
}

FuturePtr ReduceScatter::run(const at::Tensor& output, const at::Tensor& input, double factor) {
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
  job->step = num_calls_;
  job->owner = std::make_shared<std::tuple<at::Tensor, at::Tensor, decltype(residuals_)>>(output, input, residuals_);
  job->on_nonfinite = [row = row_, input, plan, counts = counts_](const BucketJob&, int64_t chunk) {
    count_nonfinite(row, input, *plan, chunk, counts.get());
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
      payload.pack.noise = {engine.config().seed, static_cast<uint32_t>(index_), num_calls_,
                            static_cast<uint32_t>(engine.rank())};
    }
    job->payloads.push_back(std::move(payload));
  }
  ++num_calls_;
  job->on_done = [future, output](std::exception_ptr error) { complete(*future, output, std::move(error)); };
  engine.submit(std::move(job));
  return future;
}

}  // namespace fusedcomm
