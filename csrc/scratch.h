// Work space that outlives a call, so that calls after the first few allocate nothing.
// Knows: pieces of memory, and that several callers may want one at a time. Does not know: what they put there.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace forerun {

class Scratch {
    struct Memory {
        std::unique_ptr<std::byte[]> bytes;
        size_t size = 0;
    };

public:
    // A piece in use; its memory goes back when it is destroyed.
    class Piece {
    public:
        Piece(Scratch& owner, Memory memory) : owner_(owner), memory_(std::move(memory)) {}
        ~Piece() { owner_.give_back(std::move(memory_)); }
        Piece(const Piece&) = delete;
        Piece& operator=(const Piece&) = delete;

        void* memory() const;  // on a cache line of its own

    private:
        Scratch& owner_;
        Memory memory_;
    };

    Piece take(size_t num_bytes);

private:
    void give_back(Memory memory);

    std::mutex mutex_;
    std::vector<Memory> free_;
};

}  // namespace forerun
