import groovy.transform.CompileStatic
import io.netty.channel.Channel
import io.netty.handler.codec.http.FullHttpResponse
import io.netty.handler.codec.http.HttpMethod
import io.netty.handler.codec.http.HttpRequest
import org.pytorch.serve.http.Session
import org.pytorch.serve.metrics.MetricCache
import org.pytorch.serve.util.ConfigManager
import org.slf4j.Logger
import org.slf4j.LoggerFactory

/**
 * What is answered when a request's header is there, before a byte of its body is held: that its model's queue is full.
 * Under overload most requests end so, and what they cost is taken from those that are answered: TorchServe (0.12) gathers
 * the body, copies it, makes a job of it, and closes the connection, so that the next try costs a new one.
 */
@CompileStatic
class Overload {
    private static final String PREDICTIONS = '/predictions/'
    private static final Logger ACCESS_LOG = LoggerFactory.getLogger('ACCESS_LOG')

    /**
     * The answer to a request whose model's queue is full, counted and logged as TorchServe's own; null where it goes on.
     *
     * @param path of the request, without its query
     */
    static FullHttpResponse answer(Channel channel, HttpRequest request, String path) {
        boolean asks = path.startsWith(PREDICTIONS) && !path.contains('%') && request.method() in [HttpMethod.POST, HttpMethod.PUT]
        List<String> words = asks ? path.substring(PREDICTIONS.length()).tokenize('/') : []
        if (!(words.size() in 1..2)) {
            return null
        }
        String version = words.size() == 2 ? words[1] : null
        ModelQueue queue = Models.queueOf(words[0], version)
        if (queue == null || !queue.isFull()) {
            return null
        }
        log(channel, request, 503)
        String host = ConfigManager.getInstance().getHostName()
        count('ts_inference_requests_total', [words[0], version ?: 'default', host])
        count('Requests5XX', ['Host', host])
        return Answers.of(503, Answers.error(503, 'ServiceUnavailableException', queue.refusal()))
    }

    /** A line as TorchServe's own, for a request that it does not get. */
    static void log(Channel channel, HttpRequest request, int status) {
        if (ACCESS_LOG.isInfoEnabled()) {
            Session session = new Session(String.valueOf(channel.remoteAddress()), request)
            session.setCode(status)
            ACCESS_LOG.info(session.toString())
        }
    }

    private static void count(String metric, List<String> dimensions) {
        MetricCache.getInstance().getMetricFrontend(metric)?.addOrUpdate(dimensions, 1.0d)
    }
}
