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

ReduceScatter::ReduceScatter(std::shared_ptr<Synchroniser> synchroniser, size_t index, Row row)
    : synchroniser_(std::move(synchroniser)), index_(index), row_(std::make_shared<const Row>(std::move(row))) {
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
  Device& device = synchroniser_->engine().device();
  for (size_t i = 0; i < plan->layouts.size(); ++i) {
    packed_.push_back({packed(i, false), packed(i, true), nullptr});
    unpacked_.push_back({unpacked(i, false), unpacked(i, true), nullptr});
    Streams &in = packed_.back(), &out = unpacked_.back();
    in.tables = device.prepare(plan->packed_rows[i], in.lossy.places, in.exact.places);
    out.tables = device.prepare(plan->layouts[i], out.lossy.places, out.exact.places);
  }
  add_residuals();
}

void ReduceScatter::add_residuals() {
  const Engine& engine = synchroniser_->engine();
  residuals_.resize(plan_->layouts.size());
  for (size_t i = 0; engine.config().feedback && i < residuals_.size(); ++i) {
    const BucketLayout& layout = plan_->packed_rows[i];
    if (layout.wire == Wire::kFp32 || layout.lossy_numel == 0) continue;
    residuals_[i] =
        std::make_shared<ResidualBuffer>(layout, *engine.config().feedback, plan_->pack_scale, plan_->reduce_scale,
                                         Place{}, synchroniser_->grad_device(), /*of_first_only=*/true);
    engine.device().will_use(residuals_[i]->storages().front());
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
    at::Tensor rows = at::zeros({layout.num_parts, layout.num_chunks * layout.part.lossy_numel},
                                at::TensorOptions(synchroniser_->grad_device()).dtype(at::kFloat));
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
  const auto add = [&](size_t piece, int64_t count) {
    if (piece < row_->size() && count != 0) found[(*row_)[piece].name] += count;
  };
  for (size_t i = 0; i < row_->size(); ++i) add(i, counts_->nonfinite[i]);
  for (const Streams& streams : packed_) {
    if (!streams.tables) continue;
    const std::vector<int64_t> counts = streams.tables->nonfinite();
    size_t slice = 0;
    for (const Stream* stream : {&streams.lossy, &streams.exact}) {
      for (const size_t piece : stream->pieces) add(piece, counts.at(slice++));
    }
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

ReduceScatter::Stream ReduceScatter::packed(size_t payload, bool exact) const {
  const BucketLayout& own = plan_->layouts[payload];
  const int64_t segment = segment_numel(own, exact), num_rows = synchroniser_->engine().world_size();
  Stream stream;
  const auto append = [&](size_t piece, int64_t offset, int64_t numel) {
    if (numel == 0) return;
    stream.places.push_back({offset, numel});
    stream.pieces.push_back(piece);
  };
  for (int64_t chunk = 0; chunk < own.num_chunks && segment != 0; ++chunk) {
    for (int64_t row = 0; row < num_rows; ++row) {
      int64_t filled = 0;  // elements of the segment
      for_segment(*row_, *plan_, payload, exact, chunk, [&](size_t piece, int64_t offset, int64_t numel) {
        append(piece, row * row_numel_ + offset, numel);
        filled += numel;
      });
      append(row_->size(), num_rows * row_numel_, segment - filled);  // zeros follow the input
    }
  }
  return stream;
}

ReduceScatter::Stream ReduceScatter::unpacked(size_t payload, bool exact) const {
  Stream stream;
  for_pieces(*row_, *plan_, payload, exact, [&](size_t piece, int64_t offset, int64_t) {
    stream.places.push_back({offset, (*row_)[piece].numel});
    stream.pieces.push_back(piece);
  });
  return stream;
}

std::vector<Payload> ReduceScatter::payloads_of(const at::Tensor& output, const at::Tensor& input,
                                                uint32_t call) const {
  const Engine& engine = synchroniser_->engine();
  const auto slices = [](const Stream& stream, const at::Tensor& tensor) {
    const GradDtype dtype = grad_dtype_of(tensor.scalar_type());
    auto* const data = static_cast<std::byte*>(tensor.data_ptr());
    SliceList list;
    for (const SlicePlace& place : stream.places) {
      list.append(data + place.offset * grad_nbytes(dtype), place.numel, dtype);
    }
    return list;
  };
  std::vector<Payload> payloads;
  for (size_t i = 0; i < packed_.size(); ++i) {
    Payload payload;
    payload.streams = {slices(packed_[i].lossy, input), slices(packed_[i].exact, input), input.data_ptr(),
                       packed_[i].tables};
    payload.unpacked = {slices(unpacked_[i].lossy, output), slices(unpacked_[i].exact, output), output.data_ptr(),
                        unpacked_[i].tables};
    if (residuals_[i]) payload.pack.residual = residuals_[i]->of_first();
    if (engine.config().stochastic) {
      payload.pack.stochastic = true;
      payload.pack.noise = {engine.config().seed, static_cast<uint32_t>(index_), call,
                            static_cast<uint32_t>(engine.rank())};
    }
    payloads.push_back(std::move(payload));
  }
  return payloads;
}

FuturePtr ReduceScatter::run(const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call,
                             bool is_last) {
  Engine& engine = synchroniser_->engine();
  const int64_t numel = engine.world_size() * row_numel_;
  const c10::Device device = synchroniser_->grad_device();
  TORCH_CHECK_VALUE(input.device() == device && output.device() == device, "fusedcomm: ", label_->text,
                    ": the reduce-scatter's input is on ", input.device(), ", its output on ", output.device(),
                    ", and fusedcomm was attached for gradients on ", device);
  engine.device().check_caller();
  TORCH_CHECK_VALUE(
      input.numel() == numel && output.numel() == row_numel_ && input.is_contiguous() && output.is_contiguous(),
      "fusedcomm: ", label_->text, ": the reduce-scatter has ", input.numel(), " elements for ", output.numel(),
      ", and its parameters have ", numel, " for ", row_numel_);
  const int64_t room = static_cast<int64_t>(input.storage().nbytes() / input.element_size()) - input.storage_offset();
  TORCH_CHECK_VALUE(room >= numel + padding_numel_, "fusedcomm: ", label_->text, ": its input has no room for padding");
  auto future = make_future(device);
  const std::shared_ptr<const BucketPlan> plan = plan_of(factor);
  auto job = std::make_shared<BucketJob>();
  job->plan = plan;
  job->label = label_;
  job->is_last = is_last;
  job->grad_nbytes = static_cast<int64_t>(input.nbytes());
  job->step = call;
  job->owner = std::make_shared<std::tuple<at::Tensor, at::Tensor, decltype(residuals_)>>(output, input, residuals_);
  job->on_nonfinite = [row = row_, input, plan, counts = counts_](const BucketJob&, int64_t chunk) {
    count_nonfinite(*row, input, *plan, chunk, counts.get());
  };
  job->payloads = payloads_of(output, input, call);
  job->on_done = [future, output, input, device = engine.shared_device()](std::exception_ptr error) {
    // Else the caller's stream waits for ours before the memory is used for anything else.
    if (error) {
      for (const at::Tensor& tensor : {input, output}) device->will_use(tensor);
    }
    complete(*future, output, std::move(error));
  };
  engine.submit(std::move(job));
  return future;
}

}  // namespace fusedcomm
