#include "frontends/reducer/layout.h"

#include <algorithm>
#include <map>
#include <utility>

namespace fusedcomm {

Buckets cut(const std::vector<Piece>& pieces, const std::vector<size_t>& order, const BucketCaps& caps) {
  struct Open {
    std::vector<size_t> members;
    int64_t nbytes = 0;
    int64_t cap = 0;
    size_t last_position = 0;
  };
  std::map<std::pair<int64_t, c10::ScalarType>, Open> open;    // by group and dtype
  std::vector<std::pair<size_t, std::vector<size_t>>> closed;  // with the position of the last member in the order
  for (size_t position = 0; position < order.size(); ++position) {
    const Piece& piece = pieces[order[position]];
    if (piece.is_sparse) {
      closed.push_back({position, {order[position]}});
      continue;
    }
    Open& bucket = open.try_emplace({piece.group, piece.dtype}, Open{{}, 0, caps.first_nbytes, 0}).first->second;
    bucket.members.push_back(order[position]);
    bucket.nbytes += piece.nbytes;
    bucket.last_position = position;
    if (piece.group >= 0 || bucket.nbytes < bucket.cap) continue;
    closed.emplace_back(position, std::move(bucket.members));
    bucket = {{}, 0, caps.nbytes, 0};
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) closed.emplace_back(bucket.last_position, std::move(bucket.members));
  }
  std::sort(closed.begin(), closed.end());
  Buckets buckets;
  buckets.reserve(closed.size());
  for (auto& [position, members] : closed) buckets.push_back(std::move(members));
  return buckets;
}

}  // namespace fusedcomm
