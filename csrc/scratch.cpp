#include "scratch.h"

#include <cstdint>
#include <utility>

namespace forerun {
namespace {

constexpr size_t kLine = 64;

}  // namespace

void* Scratch::Piece::memory() const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.bytes.get());
    return reinterpret_cast<void*>((address + kLine - 1) / kLine * kLine);
}

Scratch::Piece Scratch::take(size_t num_bytes) {
    Memory memory;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!free_.empty()) {
            memory = std::move(free_.back());
            free_.pop_back();
        }
    }
    if (memory.size < num_bytes + kLine) {
        memory.size = num_bytes + num_bytes / 2 + kLine;
        memory.bytes.reset(new std::byte[memory.size]);
    }
    return {*this, std::move(memory)};
}

void Scratch::give_back(Memory memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(memory));
}

}  // namespace forerun
