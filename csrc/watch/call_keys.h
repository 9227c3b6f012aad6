// Where the watches of all ranks keep a roll call in the store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "watch/fields.h"

namespace fusedcomm {

inline std::string call_key(int64_t number) { return "call/" + std::to_string(number); }
inline std::string slow_key(int64_t number) { return "slow/" + std::to_string(number); }
inline std::string report_key(int64_t number) { return "report/" + std::to_string(number); }
inline std::string answer_key(int64_t number, int rank) {
  return "answer/" + std::to_string(number) + "/" + std::to_string(rank);
}

// Returns nothing if the key is not set.
inline std::optional<std::string> read_key(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return store.get_to_str(key);
}

// What a rank's process is and where, for people; set before there is a watch.
inline std::string who_key(int rank) { return "who/" + std::to_string(rank); }
// A rank's state when its watch began, with its addresses.
inline std::string began_key(int rank) { return "began/" + std::to_string(rank); }

template <typename Struct>
std::optional<Struct> decode_if_readable(const std::string& text) {
  try {
    return decode<Struct>(text);
  } catch (const UnreadableError&) {
    return std::nullopt;
  }
}

}  // namespace fusedcomm
