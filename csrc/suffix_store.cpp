#include "suffix_store.h"

#include <limits>

namespace forerun {
namespace {

constexpr int32_t kEnd = std::numeric_limits<int32_t>::min();  // what follows the last token

// The first place in [first, last) from which on `is_there` holds.
template <class Holds>
int64_t first_place(int64_t first, int64_t last, Holds is_there) {
    while (first < last) {
        const int64_t middle = first + (last - first) / 2;
        if (is_there(middle))
            last = middle;
        else
            first = middle + 1;
    }
    return first;
}

}  // namespace

StoreMatch SuffixStore::longest(const int32_t* tail, int32_t num) const {
    StoreMatch best;
    int32_t most = num;
    while (best.length < most) {  // what occurs, occurs without its first token, too
        const int32_t length = (best.length + most + 1) / 2;
        const StoreMatch found = range(tail + num - length, length);
        if (found.last > found.first)
            best = found;
        else
            most = length - 1;
    }
    return best;
}

StoreMatch SuffixStore::follow(StoreMatch match, int32_t token, int32_t longest_match) const {
    std::vector<int32_t> said(match.length + 1, token);
    if (match.length > 0) {
        const int64_t start = order_[match.first];
        for (int32_t i = 0; i < match.length; ++i) said[i] = tokens_[start + i];
    }
    if (match.length > 0 && match.length < longest_match) {
        const int64_t first =
            first_place(match.first, match.last, [&](int64_t at) { return token_at(at, match.length) >= token; });
        const int64_t last =
            first_place(first, match.last, [&](int64_t at) { return token_at(at, match.length) > token; });
        if (last > first) return {first, last, match.length + 1};
    }
    const int32_t num = match.length < longest_match ? match.length + 1 : longest_match;
    return longest(said.data() + said.size() - num, num);
}

StoreMatch SuffixStore::shorter(StoreMatch match) const {
    const int32_t length = match.length / 2;
    if (length == 0) return {};
    return range(tokens_ + order_[match.first] + (match.length - length), length);
}

std::vector<SuffixStore::Follower> SuffixStore::followers(StoreMatch match) const {
    std::vector<Follower> found;
    const int64_t num = match.last - match.first, sampled = num_sampled(match);
    for (int64_t i = 0; i < sampled; ++i) {
        const int32_t token = token_at(match.first + i * num / sampled, match.length);
        if (found.empty() || found.back().token != token) found.push_back({token, 0});
        ++found.back().count;
    }
    return found;
}

StoreMatch SuffixStore::range(const int32_t* key, int32_t num) const {
    const int64_t first = first_place(0, size_, [&](int64_t at) { return compare(at, key, num) >= 0; });
    return {first, first_place(first, size_, [&](int64_t at) { return compare(at, key, num) > 0; }), num};
}

// Whether the suffix begins with a lower text than `key`, with it, or with a higher one: -1, 0, 1.
int SuffixStore::compare(int64_t place, const int32_t* key, int32_t num) const {
    for (int32_t depth = 0; depth < num; ++depth) {
        const int32_t token = token_at(place, depth);
        if (token != key[depth]) return token < key[depth] ? -1 : 1;
    }
    return 0;
}

int32_t SuffixStore::token_at(int64_t place, int32_t depth) const {
    const int64_t at = static_cast<int64_t>(static_cast<uint32_t>(order_[place])) + depth;  // a damaged file, too
    return at < size_ ? tokens_[at] : kEnd;
}

}  // namespace forerun
