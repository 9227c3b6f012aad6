#include "frontends/fsdp/reduce_scatter.h"

#include <algorithm>
#include <utility>

#include "gradients/grad_dtype.h"

namespace fusedcomm {

ReduceScatter::ReduceScatter(std::shared_ptr<Synchronizer> synchronizer, size_t index, std::vector<Piece> pieces)
    : synchronizer_(std::move(synchronizer)), index_(index), pieces_(std::move(pieces)) {
  const int64_t world_size = synchronizer_->engine().world_size();
  for (const Piece& piece : pieces_) {
    const auto options = at::TensorOptions(synchronizer_->grad_device()).dtype(at::kFloat);
    all_.push_back(at::empty({}, options).expand({world_size, piece.numel}));
    synchronizer_->know(all_.back(), piece.name, piece.wire);
  }
}

void ReduceScatter::set_row(std::vector<size_t> row) {
  const Engine& engine = synchronizer_->engine();
  std::vector<std::string> names;
  int64_t exact_numel = 0;
  std::vector<int64_t> lossy_numels(engine.config().others.size() + 1);
  parameters_.clear();
  places_.clear();
  row_numel_ = 0;
  for (const size_t i : row) {
    const Piece& piece = pieces_.at(i);
    names.push_back(piece.name);
    parameters_.push_back(all_[i]);
    places_.push_back({row_numel_, piece.numel});
    row_numel_ += piece.numel;
    (piece.wire == kExactWire ? exact_numel : lossy_numels.at(static_cast<size_t>(piece.wire))) += piece.numel;
  }
  title_ = make_label(index_, names, static_cast<double>(row_numel_) * 4 * engine.world_size())->text;
  plan_ = plan_reduce_scatter(engine.config(), engine.world_size(), exact_numel, lossy_numels, /*factor=*/1);
}

int64_t ReduceScatter::padding_numel() const {
  int64_t padding = 0;
  const auto count = [&padding](int64_t segment, int64_t num_chunks, int64_t numel) {
    padding = std::max(padding, std::min(segment, segment * num_chunks - numel));
  };
  for (const BucketLayout& own : plan_.layouts) {
    count(own.part.lossy_numel, own.num_chunks, own.lossy_numel);
    count(own.part.exact_numel, own.num_chunks, own.exact_numel);
  }
  return padding;
}

int64_t ReduceScatter::residual_nbytes() const {
  const auto& feedback = synchronizer_->engine().config().feedback;
  int64_t nbytes = 0;
  for (const BucketLayout& packed : plan_.packed_rows) {
    if (feedback && packed.wire != Wire::kFp32) nbytes += fusedcomm::residual_nbytes(*feedback, packed.lossy_numel);
  }
  return nbytes;
}

FuturePtr ReduceScatter::run(const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call,
                             bool is_last) {
  const int64_t num_rows = synchronizer_->engine().world_size(), numel = num_rows * row_numel_;
  const c10::Device device = synchronizer_->grad_device();
  TORCH_CHECK_VALUE(input.device() == device && output.device() == device, "fusedcomm: ", title_,
                    ": the reduce-scatter's input is on ", input.device(), ", its output on ", output.device(),
                    ", and fusedcomm was attached for gradients on ", device);
  TORCH_CHECK_VALUE(
      input.numel() == numel && output.numel() == row_numel_ && input.is_contiguous() && output.is_contiguous(),
      "fusedcomm: ", title_, ": the reduce-scatter has ", input.numel(), " elements for ", output.numel(),
      ", and its parameters have ", numel, " for ", row_numel_);
  const int64_t room = static_cast<int64_t>(input.storage().nbytes() / input.element_size()) - input.storage_offset();
  TORCH_CHECK_VALUE(room >= numel + padding_numel(), "fusedcomm: ", title_, ": its input has no room for padding");
  for (const at::Tensor& tensor : {input, output}) grad_dtype_of(tensor.scalar_type());  // throws for any other
  Bucket bucket(index_, is_last, parameters_, std::make_shared<const Gradients>(input.view({-1}), places_, num_rows));
  bucket.is_alone = true;
  bucket.factor = factor;
  bucket.own_row = Bucket::OwnRow{output, call};
  return synchronizer_->run(bucket);
}

}  // namespace fusedcomm
