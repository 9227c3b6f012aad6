// The scenes of the library that tests/helpers/cuda_stress.py builds, by name.
#pragma once

#include <map>
#include <string>

using Scenes = std::map<std::string, void (*)()>;

extern const Scenes kCudaScenes, kCudaFailures, kLaneScenes, kMembersScenes, kNcclScenes;
