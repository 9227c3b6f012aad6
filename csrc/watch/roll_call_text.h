// The sentences of a roll call, for people. Nothing reads them to decide anything: that is what the fields are for.
#pragma once

#include <string>
#include <vector>

#include "watch/roll_call.h"

namespace fusedcomm {

// One line for the call, then one for each thing found, indented.
std::string report_text(const RollCall& call, const Conclusion& conclusion);

// "where nothing has moved for 2.5 s"
std::string why_text(const Opening& opening);
// "opened by rank 1, where nothing has moved for 2.5 s"
std::string opening_text(const std::optional<Opening>& opening);
// "rank 2", "ranks 0, 1 and 5 more"
std::string ranks_text(const std::vector<int>& ranks);
// "2.5 s"
std::string seconds_text(double seconds);
// For a state with a job: "the all-to-all of chunk 1/4 of bucket 0 (…)", or "the others in state_dict()".
std::string under_way_text(const RankState& state);

}  // namespace fusedcomm
