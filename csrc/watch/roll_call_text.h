// The sentences of a roll call, for people. No code decides anything by these texts; decisions use the fields.
#pragma once

#include <string>
#include <vector>

#include "watch/roll_call.h"

namespace fusedcomm {

// Returns one line for the call, then one indented line for each finding. Never empty.
std::string report_text(const RollCall& call, const Conclusion& conclusion);

// "where nothing has moved for 2.5 s"
std::string why_text(const Opening& opening);
// "opened by rank 1, where nothing has moved for 2.5 s"
std::string opening_text(const std::optional<Opening>& opening);
// "rank 2", "ranks 0, 1 and 5 more"
std::string ranks_text(const std::vector<int>& ranks);
// "2.5 s"
std::string seconds_text(double seconds);
// What a rank with a job works on or waits for: "the all-to-all of chunk 1/4 of bucket 0 (…)", "the others in
// state_dict()".
std::string under_way_text(const RankState& state);

}  // namespace fusedcomm
