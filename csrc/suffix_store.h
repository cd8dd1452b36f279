// A fixed text of token ids, searched through the sorted order of its suffixes; both usually lie in a mapped file.
// Knows the text. Does not know who wrote it. What it means: src/forerun/kernels/suffix_reference.py, which it follows
// operation by operation.
#pragma once

#include <cstdint>
#include <vector>

namespace forerun {

struct StoreMatch {
    int64_t first = 0, last = 0;  // the suffixes in these places of the order begin with the match
    int32_t length = 0;
};

class SuffixStore {
   public:
    static constexpr int64_t kSampled = 64;

    SuffixStore(const int32_t* tokens, const int32_t* order, int64_t size)
        : tokens_(tokens), order_(order), size_(size) {}

    // The longest end of the `num` tokens of `tail` that occurs.
    StoreMatch longest(const int32_t* tail, int32_t num) const;
    // The longest match of at most `longest` tokens once `token` comes behind `match`.
    StoreMatch follow(StoreMatch match, int32_t token, int32_t longest) const;
    // That of half the length.
    StoreMatch shorter(StoreMatch match) const;

    struct Follower {
        int32_t token;
        int64_t count;
    };
    // What follows the match in kSampled of its occurrences, evenly spread over the order; in all if there are fewer.
    std::vector<Follower> followers(StoreMatch match) const;
    static int64_t num_sampled(StoreMatch match) {
        return match.last - match.first < kSampled ? match.last - match.first : kSampled;
    }

   private:
    StoreMatch range(const int32_t* key, int32_t num) const;
    int compare(int64_t place, const int32_t* key, int32_t num) const;
    int32_t token_at(int64_t place, int32_t depth) const;

    const int32_t* tokens_;
    const int32_t* order_;
    int64_t size_;
};

}  // namespace forerun
