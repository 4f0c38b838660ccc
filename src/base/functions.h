#pragma once
#include "../api/standard.h"
#include "system.h"

/* --------------------------------------------------------------------------------------------- functions
   Elementary functions with the same bits on every system. C libraries differ in the last bits of exp, log,
   sin and cos, so training runs would drift apart. sqrt, rint, frexp and ldexp are exact everywhere. The test
   functions_of_every_system bounds the errors: less than 1 unit in the last place of a double for tt__exp and
   tt__ln, 2 units for sine and cosine, 3 units for tt__ln1p. */

/* log(2) and pi / 2 in parts. All parts but the last have at most 33 bits, so that their products with whole
   numbers of 20 bits are exact. */
#define TT__LN2_HIGH 0x1.62e42feep-1
#define TT__LN2_LOW 0x1.a39ef35793c76p-33
#define TT__HALF_PI_HIGH 0x1.921fb544p+0
#define TT__HALF_PI_MIDDLE 0x1.0b4611a6p-34
#define TT__HALF_PI_LOW 0x1.3198a2e037073p-69

/* Returns the sum of c[k] x^k over the n numbers in c. */
static double tt__polynomial(const double *c, int n, double x)
{
    double sum = c[n - 1];
    for (int k = n - 2; k >= 0; k--) sum = sum * x + c[k];
    return sum;
}

/* exp(x) = 2^k exp(r) with |r| <= log(2) / 2. The series of exp(r) ends after r^14 / 14!; its rest is below
   2^-60. */
static double tt__exp(double x)
{
    static const double c[] = {1 / 2.0, 1 / 6.0, 1 / 24.0, 1 / 120.0, 1 / 720.0, 1 / 5040.0, 1 / 40320.0,
                               1 / 362880.0, 1 / 3628800.0, 1 / 39916800.0, 1 / 479001600.0,
                               1 / 6227020800.0, 1 / 87178291200.0};
    if (!(x <= 709.8)) return x > 0 ? HUGE_VAL : x; /* NaN stays NaN */
    if (x < -745.2) return 0;
    const double k = rint(x * 1.4426950408889634), high = x - k * TT__LN2_HIGH, low = k * TT__LN2_LOW;
    const double r = high - low;
    return ldexp(1 + (high + (r * r * tt__polynomial(c, TT__COUNT(c), r) - low)), (int)k);
}

/* log(x) = k log(2) + log(1 + f) with sqrt(1/2) <= 1 + f < sqrt(2). With s = f / (2 + f),
   log(1 + f) = 2 (s + s^3 / 3 + s^5 / 5 + ...) = f - s (f - z (2/3 + 2/5 z + ...)), where z = s^2. The series
   ends after s^25 / 25; its rest is below 2^-66. */
static double tt__ln(double x)
{
    static const double c[] = {2 / 3.0, 2 / 5.0, 2 / 7.0, 2 / 9.0, 2 / 11.0, 2 / 13.0, 2 / 15.0, 2 / 17.0,
                               2 / 19.0, 2 / 21.0, 2 / 23.0, 2 / 25.0};
    int k;
    if (!(x > 0)) return x == 0 ? -HUGE_VAL : (double)NAN;
    if (x == HUGE_VAL) return x;
    double m = frexp(x, &k);
    if (m < 0.70710678118654752) { m *= 2; k--; }
    const double f = m - 1, s = f / (2 + f), z = s * s, rest = z * tt__polynomial(c, TT__COUNT(c), z);
    return k * TT__LN2_HIGH + (f - (s * (f - rest) - k * TT__LN2_LOW));
}

/* log(1 + x) for x > -1, also where 1 + x rounds x away (Kahan's method, as in the HP-15C). */
static double tt__ln1p(double x)
{
    const double sum = 1 + x;
    return sum == 1 ? x : tt__ln(sum) * (x / (sum - 1));
}

/* base^exponent for a base above 0; the relative error is about |exponent log(base)| 2^-53. */
static double tt__pow(double base, double exponent) { return tt__exp(exponent * tt__ln(base)); }

/* Returns sin(x + quarters * pi / 2) for |x| below 1e6. x = q pi/2 + r with |r| <= pi / 4; the series end
   after r^17 and r^18; their rests are below 2^-62. */
static double tt__sin_of(double x, int quarters)
{
    static const double odd[] = {-1 / 6.0, 1 / 120.0, -1 / 5040.0, 1 / 362880.0, -1 / 39916800.0,
                                 1 / 6227020800.0, -1 / 1307674368000.0, 1 / 355687428096000.0};
    static const double even[] = {1 / 24.0, -1 / 720.0, 1 / 40320.0, -1 / 3628800.0, 1 / 479001600.0,
                                  -1 / 87178291200.0, 1 / 20922789888000.0, -1 / 6402373705728000.0};
    const double q = rint(x * 0.63661977236758134);
    const double r = x - q * TT__HALF_PI_HIGH - q * TT__HALF_PI_MIDDLE - q * TT__HALF_PI_LOW, z = r * r;
    const int turn = (int)((int64_t)q + quarters) & 3;
    const double y = turn & 1 ? 1 - (z / 2 - z * z * tt__polynomial(even, TT__COUNT(even), z))
                              : r + r * z * tt__polynomial(odd, TT__COUNT(odd), z);
    return turn & 2 ? -y : y;
}

static double tt__sin(double x) { return tt__sin_of(x, 0); }
static double tt__cos(double x) { return tt__sin_of(x, 1); }

static float tt__expf(float x) { return (float)tt__exp(x); }
static float tt__lnf(float x) { return (float)tt__ln(x); }
