#include "gradients/rows.h"

#include <algorithm>
#include <utility>

#include "gradients/grad_dtype.h"

namespace fusedcomm {

Rows::Rows(std::shared_ptr<Synchronizer> synchronizer, size_t index, std::vector<Piece> pieces)
    : synchronizer_(std::move(synchronizer)), index_(index), pieces_(std::move(pieces)) {
  const int64_t world_size = synchronizer_->engine().world_size();
  for (const Piece& piece : pieces_) {
    const auto options = at::TensorOptions(synchronizer_->grad_device()).dtype(at::kFloat);
    all_.push_back(at::empty({}, options).expand({world_size, piece.numel}));
    synchronizer_->know(all_.back(), piece.name, piece.wire);
  }
}

void Rows::set_row(std::vector<size_t> row) {
  const Engine& engine = synchronizer_->engine();
  std::vector<std::string> names;
  std::vector<std::pair<int64_t, int>> slices;
  parameters_.clear();
  places_.clear();
  row_numel_ = 0;
  for (const size_t i : row) {
    const Piece& piece = pieces_.at(i);
    names.push_back(piece.name);
    parameters_.push_back(all_[i]);
    places_.push_back({row_numel_, piece.numel});
    row_numel_ += piece.numel;
    slices.emplace_back(piece.numel, piece.wire);
  }
  title_ = make_label(index_, names, static_cast<double>(row_numel_) * 4 * engine.world_size())->text;
  const ListNumels numels = list_numels(slices, grad_nbytes(GradDtype::kBFloat16), /*in_one_run=*/true);
  scatter_plan_ = plan_reduce_scatter(engine.config(), engine.world_size(), numels, /*factor=*/1);
  gather_plan_ = plan_all_gather(engine.config(), engine.world_size(), numels);
  again_plan_ = plan_all_gather(engine.config(), engine.world_size(), numels, Keeping::kAgain);
  kept_ = nullptr;
}

FuturePtr Rows::reduce_scatter(const at::Tensor& rows, const at::Tensor& own, double factor, bool is_last) {
  return run(rows, {own, /*gathers=*/false, factor}, is_last);
}

FuturePtr Rows::all_gather(const at::Tensor& rows, const at::Tensor& own, bool is_last, Keeping keeping) {
  const int64_t kept_nbytes = keeping == Keeping::kNothing ? 0 : again_plan_.kept_nbytes;
  TORCH_CHECK(keeping != Keeping::kAgain || (kept_ && kept_nbytes != 0), "fusedcomm: ", title_,
              ": nothing was kept that could be gathered again");
  if (kept_nbytes != 0 && !kept_) {
    kept_ = std::make_shared<KeptMessages>();
    kept_->codes = synchronizer_->engine().device().allocate(kept_nbytes);
    kept_->nbytes = kept_nbytes;
  }
  OfRows kind{own, /*gathers=*/true};
  if (kept_nbytes != 0) kind.kept = kept_;
  kind.is_again = keeping == Keeping::kAgain;
  return run(rows, std::move(kind), is_last);
}

FuturePtr Rows::run(const at::Tensor& rows, OfRows kind, bool is_last) {
  const at::Tensor& own = kind.own;
  const int64_t num_rows = synchronizer_->engine().world_size(), numel = num_rows * row_numel_;
  const c10::Device device = synchronizer_->grad_device();
  TORCH_CHECK_VALUE(rows.device() == device && own.device() == device, "fusedcomm: ", title_, ": the rows are on ",
                    rows.device(), ", this rank's on ", own.device(), ", and fusedcomm was attached for gradients on ",
                    device);
  TORCH_CHECK_VALUE(rows.numel() == numel && own.numel() == row_numel_ && rows.is_contiguous() && own.is_contiguous(),
                    "fusedcomm: ", title_, ": the rows have ", rows.numel(), " elements, this rank's ", own.numel(),
                    ", and their parameters have ", numel, " and ", row_numel_);
  for (const at::Tensor& tensor : {rows, own}) grad_dtype_of(tensor.scalar_type());  // throws for any other
  auto gradients = std::make_shared<const Gradients>(rows.view({-1}), places_, num_rows);
  return synchronizer_->run({index_, is_last, parameters_, std::move(gradients), std::move(kind)});
}

}  // namespace fusedcomm
