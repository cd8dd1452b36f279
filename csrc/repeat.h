// Loops that are gone before the compiler looks for registers: an array indexed by constants alone stays in them.
// Part of an instruction set's namespace, like the wrappers that include it.
#pragma once

#define FORERUN_INLINE [[gnu::always_inline]] inline
#define FORERUN_FLAT __attribute__((always_inline))

namespace forerun::FORERUN_ISA {

template <int... I>
struct Ints {};
template <int N, int... I>
struct CountUp : CountUp<N - 1, N - 1, I...> {};
template <int... I>
struct CountUp<0, I...> {
    using Type = Ints<I...>;
};
// Ints<0, ..., N - 1>
template <int N>
using Count = typename CountUp<N>::Type;

template <int I>
struct Index {
    static constexpr int value = I;
    FORERUN_INLINE constexpr operator int() const { return I; }
};

template <class Body, int... I>
FORERUN_INLINE void repeat_each([[maybe_unused]] Body body, Ints<I...>) {
    (body(Index<I>{}), ...);
}

// body(0), ..., body(N - 1), each index a constant with a `value`. A body that takes it as an int is compiled once and not
// N times, which took half of the time that tiles took to compile.
template <int N, class Body>
FORERUN_INLINE void repeat(Body body) {
    repeat_each(body, Count<N>{});
}

}  // namespace forerun::FORERUN_ISA
