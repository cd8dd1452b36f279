// A suffix automaton over a growing text of token ids, and what followed its substrings how often.
// Knows texts. Does not know requests or trees. What it means: src/forerun/kernels/suffix_reference.py, which it
// follows operation by operation, so that both make the same guesses to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forerun {

struct SuffixMatch {
    int32_t state = 0, length = 0;  // the last `length` tokens of a text, found in `state`
};

class SuffixAutomaton {
   public:
    static constexpr int32_t kRoot = 0;
    static constexpr int32_t kListed = 4;

    explicit SuffixAutomaton(int32_t window);

    void append(int32_t token);

    int32_t size() const { return size_; }
    int32_t window() const { return window_; }
    int32_t length_of(int32_t state) const { return states_[state].length; }
    int32_t link_of(int32_t state) const { return states_[state].link; }
    // Where the second-to-last occurrence of a state's substrings ends.
    int32_t earlier_end(int32_t state) const { return states_[state].earlier; }
    // Occurrences of a state's substrings that something follows.
    int32_t num_continued(int32_t state) const { return states_[state].count - (states_[state].end == size_); }

    // The state of the last `length` tokens of a substring in `state`.
    int32_t shorten(int32_t state, int32_t length) const;
    // The longest match shorter than the window once `token` comes behind `match`.
    SuffixMatch follow(SuffixMatch match, int32_t token) const;
    // The longest tail of the text, at most `longest` <= window tokens, that also occurred earlier.
    SuffixMatch repeated_tail(int32_t longest) const;

    // Calls visit(token, state, is_latest) for up to `most` tokens that follow a state, first seen first.
    template <class Visit>
    void for_continuations(int32_t state, int32_t most, Visit visit) const {
        int32_t latest = 0;
        int32_t left = most;
        for (int32_t e = states_[state].first_edge; e >= 0 && left > 0; e = edges_[e].next, --left)
            latest = states_[edges_[e].to].end > latest ? states_[edges_[e].to].end : latest;
        left = most;
        for (int32_t e = states_[state].first_edge; e >= 0 && left > 0; e = edges_[e].next, --left)
            visit(edges_[e].token, states_[edges_[e].to].count, states_[edges_[e].to].end == latest);
    }
    int32_t num_edges(int32_t state) const { return states_[state].num_edges; }

   private:
    struct State {
        int32_t length = 0, link = 0;
        int32_t count = 0, end = 0, earlier = 0;  // kept for substrings of at most `window` tokens
        int32_t first_edge = -1, last_edge = -1, num_edges = 0;
    };
    struct Edge {
        int32_t from, token, to, next;
    };

    int32_t insert(int32_t token);
    int32_t split(int32_t state, int32_t token, int32_t edge);
    int32_t new_state(int32_t length);
    void add_edge(int32_t from, int32_t token, int32_t to);
    int32_t find_edge(int32_t from, int32_t token) const;  // -1: none
    void hash_edge(int32_t edge);
    uint32_t slot_of(int32_t from, int32_t token) const;

    int32_t window_, size_ = 0;
    int32_t whole_ = kRoot;  // the state of the whole text
    int32_t tail_ = kRoot;   // the state of its last `window` tokens
    std::vector<State> states_;
    std::vector<Edge> edges_;
    // Open addressing by (from, token) -> edge, -1 where empty, for states with more edges than kListed. Few have, and
    // following a list stays near in memory along a text, where hashing jumps.
    std::vector<int32_t> slots_;
    size_t num_hashed_ = 0;
};

}  // namespace forerun
